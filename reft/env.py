"""Environment variables that reft reads or sets: all of them, in one place. Standard library
only."""

from __future__ import annotations

ENV_MEMORY_DIR = "REFT_MEMORY_DIR"
"""Directory for the memory of all jobs on this node: ``memory_dir`` of the block."""
ENV_JOB_ID = "REFT_JOB_ID"  # the job's name: ``job_id`` of the block
# a JSON file that holds the ``reft`` block of a program without a DeepSpeed JSON
ENV_CONFIG = "REFT_CONFIG"
ENV_NODE_ID = "REFT_NODE_ID"  # This node's name
ENV_NODE_DECLARED = "REFT_NODE_DECLARED"
"""1 where the node's id was given by somebody, 0 where the launcher made it."""
ENV_SECRET = "REFT_SECRET"  # the user's secret, in hexadecimal digits
ENV_STORE = "REFT_STORE"  # Endpoint of the rendezvous store, where trainers note what is committed
ENV_ETCD_USER = "REFT_ETCD_USER"
"""etcd's user, where its authentication is on; so are the next five for ``--rdzv-backend etcd-v3``
alone."""
ENV_ETCD_PASSWORD = "REFT_ETCD_PASSWORD"
"""Of that user; the launcher takes it out of its environment, and trainers do not see it."""
ENV_ETCD_PASSWORD_FILE = "REFT_ETCD_PASSWORD_FILE"  # a file that holds it
# a file with the certificates that sign those of etcd's members
ENV_ETCD_CACERT = "REFT_ETCD_CACERT"
ENV_ETCD_CERT = "REFT_ETCD_CERT"  # a file with the launcher's certificate, where etcd asks for one
ENV_ETCD_KEY = "REFT_ETCD_KEY"  # a file with its key
ENV_ROUND = "REFT_ROUND"  # number of the rendezvous from which the trainers were started
ENV_INCARNATION = "REFT_INCARNATION"
"""Number of this start of the job, as the launchers agreed on it: greater than those of all starts
before."""
ENV_NODES = "REFT_NODES"  # MIN:MAX of the launcher's ``--nnodes``
ENV_LAUNCHER_PID = "REFT_LAUNCHER_PID"  # the process whose end ends the trainers of this node
# Directory where trainers of one round leave their `reft.job.script.ExitNote`
ENV_EXIT_DIR = "REFT_EXIT_DIR"
ENV_EVENTS = "REFT_EVENTS"  # Directory for `reft.log.EventLog`
# set by ``reft profile``, which measures jobs with and without the block
ENV_PROFILE = "REFT_PROFILE"
ENV_REPLAY = "REFT_REPLAY"  # set by ``reft replay``: the step after which the job ends
# set by ``reft rehearse``: the directory where every step is recorded
ENV_REHEARSE = "REFT_REHEARSE"
# 1 where ``reft launch --dry-run`` wants the job to end before its first step
ENV_DRY_RUN = "REFT_DRY_RUN"
ENV_WARM = "REFT_WARM"
"""1 or 0: whether trainers are forked from a process that has torch imported, where the command
line does not say."""
ENV_LOG_LEVEL = "REFT_LOGLEVEL"
"""What reft logs to stderr: a level of :mod:`logging`; without it INFO, and in trainers what the
script's logging lets through."""
ENV_CLUSTER = "REFT_LOCAL_CLUSTER"
"""Every process of a local cluster has ``<token>:<node id>`` here, wherever it was forked."""
ENV_ROOM = "REFT_ROOM"
"""Makes room in the memory in which the kernel shows the environment of a server that forks
programs."""

# Of others, by the names that they gave.

ENV_INTERFACE = "GLOO_SOCKET_IFNAME"  # names the network interface, here as for torch's gloo
ENV_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # TorchElastic's: where a trainer leaves what ended it
ENV_EXTENSIONS = "TORCH_EXTENSIONS_DIR"  # Root of torch's folder of compiled operators
