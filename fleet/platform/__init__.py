"""The BlobHub client (protocol §1)."""
