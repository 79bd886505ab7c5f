"""`kvagent doctor`: what on this machine will make transfers fail, or slow, and what to do.

Facts are collected (`collect`, `ucx`, `network`, `selfread`, `peer`), and judged by functions that
see nothing but facts (`software`, `host`, `transports`, `doors`, `reads`). NIXL and UCX are only
ever loaded in processes of their own, since what is wrong with them may be that they crash.
"""
