"""What a file is by its first bytes, where it is neither text nor token ids."""

import re

SIGNATURE_BYTES = 512  # of the beginning of a file, which tell what it is
# the first bytes → what such a file is, what to do with it where text is wanted
SIGNATURES = (
    (rb'PK\x03\x04|PK\x05\x06', 'a zip archive (as .docx, .npz and .pt files are)',
     'unpack or export it'),
    (rb"7z\xbc\xaf'\x1c", 'a 7z archive', 'unpack it'),
    (rb'Rar!\x1a\x07', 'a rar archive', 'unpack it'),
    (rb'.{257}ustar[\0 ]', 'a tar archive', 'unpack it'),
    (rb'\x1f\x8b\x08[\0-\x1f]', 'gzip', 'name it .gz'),
    (rb'\x28\xb5\x2f\xfd', 'Zstandard', 'name it .zst'),
    (rb'BZh[1-9]1AY&SY', 'bzip2', 'unpack it'),
    (rb'\xfd7zXZ\0', 'xz', 'unpack it'),
    (rb'PAR1\x15', 'Parquet', 'name it .parquet'),
    (rb'ARROW1\0\0', 'Arrow', 'export its rows as .parquet'),
    (rb'%PDF-\d', 'a PDF', 'extract its text'),
    (rb'\x89PNG\r\n|\xff\xd8\xff|RIFF.{4}WEBP', 'a picture', 'leave it out'),
    (rb'SQLite format 3\0', 'an SQLite database', 'export its rows as .csv'),
    (rb'\x93NUMPY', "numpy's .npy", 'leave it out'),
    (rb'.{3}\0{5}\{"', '.safetensors', 'leave it out'),
    (rb'GGUF.\0\0\0', 'GGUF', 'leave it out'),
    (rb'\x89HDF\r\n\x1a\n', 'HDF5', 'leave it out'),
    (rb'\x80[\x02-\x05](\x95.{6}\0\0|\}q|\]q|c)', 'a pickle', 'leave it out'))


def identify(data):
    """(what a file is that begins with `data`, what to do with it), or ('', '')."""
    return next((found for pattern, *found in SIGNATURES if re.match(pattern, data, re.S)),
                ('', ''))
