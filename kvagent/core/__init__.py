"""The pure part: what to move, for whom and until when. No sockets, threads, clocks or NIXL."""
