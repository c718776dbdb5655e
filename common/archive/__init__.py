"""The archive in the bucket: segments and documents, their values, names, files, and store."""
