"""Limits for what strangers may send, checked before memory or time is spent. Those of requests: `serve/answers.py`.

Files are bounded in bytes, pictures in pixels and parts, backbones in the sizes that their configs may name.
"""

MOST_TEXT = 64 * 2**20
"""Bytes of a JSON, CSV or text file; the values in it can take 20 times as much memory."""
MOST_OWN_TEXT = 512 * 2**20
"""Bytes of the user's own lists of pictures and descriptions; those of 200 classes take about 20 MiB."""
MOST_LISTS = 2_000_000
"""Lists and objects in a JSON file; the descriptions of 1,000 classes have a million."""
MOST_TOML = 8 * 2**20
"""Bytes of a TOML file: 50,000 classes. The parser is written in Python and slow."""
MOST_POINTS = 10**7
"""Sum over the lines of a TOML file of the squared number of points: the parser takes the square of the parts of a key,
and a key is on one line."""
DEEPEST = 32
"""Depth of nested tables and lists."""
MOST_TENSORS = 32 * 2**30
"""Bytes of a safetensors file; it is read into memory unchanged, so this bounds the memory too."""
MOST_HEADER = 16 * 2**20
"""Bytes of its header."""
MOST_ENTRIES = 100_000
"""Tensors in it; CLIP's largest has 1,500."""

MOST_PICTURE = 256 * 2**20
"""Bytes of a picture file; decoders take up to three times as much."""
MOST_PIXELS = 100_000_000
"""Pixels of a picture (or of a tile of a TIFF), by its header."""
MOST_ROWS = 100_000
"""Pixels of a side of a picture; Pillow takes time and memory for each row."""
LARGE_PICTURE = 8_000_000
"""Pixels above which a picture is decoded while no other such picture is."""
MOST_SCANS = 32
"""Scans of a JPEG; each takes a tenth of a second for 100 million pixels. Progressive pictures have about ten."""
MOST_SEGMENTS = 500
"""Segments of a JPEG; a colour profile takes up to 255."""
MOST_READS = 200_000
"""Reads of a decoder in Python from one file. A PNG of 256 MiB takes 130,000."""
MOST_NUMBERS = 200_000
"""Numbers in a tag of a TIFF; Pillow makes an object of each strip."""
MOST_PLAIN = 2 * 2**20
"""Bytes of a PPM file that is written in digits, which Pillow decodes in Python."""
LONGEST_SIDE = 1024
"""Side of the pictures that a backbone reads, before and after its crop; CLIP's largest is 448."""
LONGEST_SHAPE = 32
"""Longer pictures are cropped to this ratio of the sides before they are resized. So no resized picture has more pixels
than `LONGEST_SHAPE * LONGEST_SIDE**2`."""

MOST_TOKENS = 10**6
"""Tokens of a vocabulary, and other sizes in the config of a backbone."""
MOST_NEW_NUMBERS = 2**28
"""Numbers in the tensors that a method makes when it is loaded, besides four for each that is stored: the sizes are in
its settings."""
