"""A soak: random traffic under random faults, with every byte checked. `scripts/soak` runs it.

Real sidecars, and engines that consist of processes of their own, so that each can be killed:

    shapes     what the engines look like, and the pattern that their caches are filled with
    pool       blocks that carry a stamp while nobody owns them
    messages   what the soak and its engines say to each other
    worker     a process for each rank of an engine
    scheduler  another one: it offers, fetches, and checks
    parts      those and the sidecars, as they are started and killed
    world      starts them, restarts what died, notices what died by itself
    traffic    requests, and what became of each
    faults     what goes wrong, and how long it took to recover
    report     the tables
    run        from start to verdict

It uses what an engine may use, the two clients, and looks at sidecars only through /status.
"""
