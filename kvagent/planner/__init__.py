"""`kvagent plan`: who would read what from whom, told before anything runs."""
