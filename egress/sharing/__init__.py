"""Who of a site's members works on what: fair shares of the leases, and their hand-over."""
