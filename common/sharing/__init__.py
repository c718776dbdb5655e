"""Who of several processes works on what: fair shares of the leases, and their hand-over."""
