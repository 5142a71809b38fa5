"""HDF5 files: where their datasets lie, read without the HDF5 library, which hostile files have broken many a time.

Source: "HDF5 File Format Specification Version 3.0" (https://support.hdfgroup.org/documentation/hdf5/latest/_f_m_t3.html),
whose names of structures and messages are used here. Superblocks 0 to 3; groups of both kinds; contiguous and chunked
datasets. Checksums are not compared: what is read decides where chunks of ours begin, and no more.
"""
