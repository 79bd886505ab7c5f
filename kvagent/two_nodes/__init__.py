"""`scripts/two_nodes`: what docker/compose.yml describes, in Linux namespaces, without containers.

It is how the two nodes are shown, and tested, on a machine without a container engine. It is no
container engine: there is no image, and nothing is kept from the machine's files. But networks,
process trees and volumes are as apart as those of the containers.

    compose      the compose file, read strictly        namespaces  networks, links, mounts
    containers   a service as a process tree            stage       start, health, order
    outage       the link is cut in a transfer          report      what came out
    show         all of it, in order
"""
