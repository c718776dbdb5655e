"""What egress, ingress and compaction share. Imports none of them (import-linter holds it)."""
