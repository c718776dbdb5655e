"""`floe demo`: two sites, a bucket and a centre on this machine, with kills, a compaction and a comparison."""
