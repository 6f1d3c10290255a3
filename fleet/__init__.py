"""BlobHub fleet: coding agents on several machines, driven by threads."""

__version__ = "0.1.0"
