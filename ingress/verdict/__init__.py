"""Verdict on the rows of an open intent that a target holds: judged, confirmed, settled."""
