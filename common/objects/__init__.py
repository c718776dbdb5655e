"""The object store port and its two implementations: S3 and a local directory."""
