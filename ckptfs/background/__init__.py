"""What costs processor time and nobody waits for: hashing files that are sealed, encoding packs that are uploaded.

`tasks` lists the work; `caller` has it done, by a process of its own (`worker`), whose priority is low and whose use of
the interpreter holds up no request. Arguments and results are plain values, as marshal knows them.
"""
