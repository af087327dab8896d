"""What more ranks would give: a cost model fitted on this machine, its replay event by event, and what it earned on held-out runs."""
