"""What travels on sockets: messages, their encoding, and the two kinds of endpoint.

Nothing here decides anything; the decisions are in `kvagent.core` and `kvagent.agent`.
"""
