"""Readers of checkpoint formats, and the boundaries that follow from them.

`recognise.recognise` says which tensors a file holds and where; `cutting.cut` turns that into pieces. Everything here
is pure: bytes in, values out. Nothing is executed, imported or unpickled, whatever a file says.
"""
