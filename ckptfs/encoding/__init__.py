"""Bytes <-> values: chunk codecs and every object on the remote. Pure: no files, no network, no clock.

`canonical` (JSON, frames, digests), `fields` and `columns` (strict reading of JSON values), `features` (evolution),
`keys` (object names), `codec`, `pack`, `manifest`, `tree`, `index`, `head`, `remote_format`. docs/format.md is the
specification.

Whatever is decoded is checked in full, and FormatError says what is wrong; nothing here trusts a stored length.
"""
