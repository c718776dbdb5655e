"""What a target holds of an open intent: judged, confirmed, settled."""
