"""All environment variables that reft reads or sets. Standard library only."""

from __future__ import annotations

ENV_MEMORY_DIR = "REFT_MEMORY_DIR"
"""Directory for the memory of all jobs on this node; overrides ``memory_dir`` of the reft block."""
ENV_JOB_ID = "REFT_JOB_ID"  # Name of the job's memory; overrides ``job_id`` of the reft block
# A JSON file with the ``reft`` block of a program that has no DeepSpeed JSON
ENV_CONFIG = "REFT_CONFIG"
ENV_NODE_ID = "REFT_NODE_ID"  # Id of this node
ENV_NODE_DECLARED = "REFT_NODE_DECLARED"
"""1 if the user gave the node its id, 0 if the launcher derived the id."""
ENV_RACK = "REFT_RACK"
"""Rack or switch of this node; a recovery prefers sources in the same rack."""
ENV_SECRET = "REFT_SECRET"  # The user's secret, in hexadecimal digits
ENV_STORE = "REFT_STORE"  # Endpoint of the rendezvous store, where trainers record commits
ENV_ETCD_USER = "REFT_ETCD_USER"
"""Name of etcd's user, if etcd requires authentication. This variable and the next five are only
used for ``--rdzv-backend etcd-v3``."""
ENV_ETCD_PASSWORD = "REFT_ETCD_PASSWORD"
"""Password of etcd's user. The launcher removes it from its environment, so that trainers do not
inherit it."""
ENV_ETCD_PASSWORD_FILE = "REFT_ETCD_PASSWORD_FILE"  # File with the password of etcd's user
# A file with the certificate authorities of etcd's members
ENV_ETCD_CACERT = "REFT_ETCD_CACERT"
ENV_ETCD_CERT = "REFT_ETCD_CERT"  # A file with the launcher's certificate, if etcd requires one
ENV_ETCD_KEY = "REFT_ETCD_KEY"  # File with the launcher's private key
ENV_ROUND = "REFT_ROUND"  # Number of the rendezvous round that started the trainers
ENV_INCARNATION = "REFT_INCARNATION"
"""Number of this start of the job (incarnation), on which the launchers have agreed; greater than
those of all earlier starts."""
ENV_NODES = "REFT_NODES"  # MIN:MAX of the launcher's ``--nnodes``
ENV_LAUNCHER_PID = "REFT_LAUNCHER_PID"  # Id of a process; when it ends, the trainers end
# Directory in which trainers of one round record why they end (`reft.job.script.ExitNote`)
ENV_EXIT_DIR = "REFT_EXIT_DIR"
ENV_EVENTS = "REFT_EVENTS"  # Directory for the files of `reft.log.EventLog`
# JSON object whose keys override the reft block; set by ``reft profile`` and similar commands
ENV_PROFILE = "REFT_PROFILE"
ENV_REPLAY = "REFT_REPLAY"  # Set by ``reft replay``: the step after which the job ends
# Set by ``reft rehearse``: the directory where every step is recorded
ENV_REHEARSE = "REFT_REHEARSE"
# Set to 1 by ``reft launch --dry-run``: the job ends before its first step
ENV_DRY_RUN = "REFT_DRY_RUN"
ENV_WARM = "REFT_WARM"
"""1 or 0: whether trainers are forked from a process that has imported torch. An option on the
command line overrides it."""
ENV_LOG_LEVEL = "REFT_LOGLEVEL"
"""Level of :mod:`logging` at which reft logs to stderr; INFO by default. In trainers, the script's
own configuration of logging applies by default."""
ENV_CLUSTER = "REFT_LOCAL_CLUSTER"
"""``<token>:<node id>``: marks every process that belongs to a node started by
``reft.job.local``."""
ENV_ROOM = "REFT_ROOM"
"""Padding in the environment of a fork server. The kernel shows a process's environment from the
memory of its start; the padding leaves room there for the longer environments of trainers."""

# Variables of other programs

# Set by Slurm: the switches above this node and the node, separated by dots; and what each part is
ENV_SLURM_ADDRESS = "SLURM_TOPOLOGY_ADDR"
ENV_SLURM_PATTERN = "SLURM_TOPOLOGY_ADDR_PATTERN"
ENV_INTERFACE = "GLOO_SOCKET_IFNAME"  # The network interface that torch's gloo uses, and reft, too
ENV_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # File to which a trainer writes the error that ended it
ENV_EXTENSIONS = "TORCH_EXTENSIONS_DIR"  # Directory in which torch keeps compiled operators
