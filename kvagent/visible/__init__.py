"""What people and monitors see of a sidecar. Nothing in here moves a byte or decides a transfer."""
