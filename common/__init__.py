"""Code that egress, ingress and compaction share; it imports none of them (import-linter enforces this)."""
