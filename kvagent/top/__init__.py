"""`kvagent top` and `kvagent status`: what sidecars say of themselves, in a terminal."""
