"""A small engine for Llama-family checkpoints, and the worked example of an integration.

It shows disaggregated serving on any machine, and what an engine has to do for it: read
`transfer.py` first, then the places in `scheduler.py` that call it. It is not built for speed.

    server     HTTP, start and stop        api        the bodies of requests and answers
    engine     the step loop               scheduler  batches, requests' states
    blocks     free blocks, prefix cache   transfer   everything that concerns kvagent
    worker     one rank: model and cache   tp         shards and collectives
    model      the forward pass            weights, gguf_file, config, tokenizer: the checkpoint
"""
