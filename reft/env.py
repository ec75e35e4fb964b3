"""All environment variables that reft reads or sets. Standard library only."""

from __future__ import annotations

ENV_MEMORY_DIR = "REFT_MEMORY_DIR"
"""Directory for the memory of all jobs on this node: ``memory_dir`` of the block."""
ENV_JOB_ID = "REFT_JOB_ID"  # The job's name: ``job_id`` of the block
# A JSON file with the ``reft`` block of a program that has no DeepSpeed JSON
ENV_CONFIG = "REFT_CONFIG"
ENV_NODE_ID = "REFT_NODE_ID"  # This node's name
ENV_NODE_DECLARED = "REFT_NODE_DECLARED"
"""1 if the node's id was declared by the user, 0 if the launcher made it."""
ENV_SECRET = "REFT_SECRET"  # The user's secret, in hexadecimal digits
ENV_STORE = "REFT_STORE"  # Endpoint of the rendezvous store, where trainers record commits
ENV_ETCD_USER = "REFT_ETCD_USER"
"""etcd's user, if authentication is enabled. This variable and the next five are only for
``--rdzv-backend etcd-v3``."""
ENV_ETCD_PASSWORD = "REFT_ETCD_PASSWORD"
"""Password of that user. The launcher removes it from its environment, so trainers do not get
it."""
ENV_ETCD_PASSWORD_FILE = "REFT_ETCD_PASSWORD_FILE"  # A file with the password
# A file with the certificate authorities of etcd's members
ENV_ETCD_CACERT = "REFT_ETCD_CACERT"
ENV_ETCD_CERT = "REFT_ETCD_CERT"  # A file with the launcher's certificate, if etcd requires one
ENV_ETCD_KEY = "REFT_ETCD_KEY"  # A file with the key of that certificate
ENV_ROUND = "REFT_ROUND"  # Number of the rendezvous round that started the trainers
ENV_INCARNATION = "REFT_INCARNATION"
"""Number of this start of the job, agreed on by the launchers; greater than those of all earlier
starts."""
ENV_NODES = "REFT_NODES"  # MIN:MAX of the launcher's ``--nnodes``
ENV_LAUNCHER_PID = "REFT_LAUNCHER_PID"  # Process with which the trainers of this node end
# Directory in which trainers of one round write their `reft.job.script.ExitNote`
ENV_EXIT_DIR = "REFT_EXIT_DIR"
ENV_EVENTS = "REFT_EVENTS"  # Directory for `reft.log.EventLog`
# Set by ``reft profile``, which measures jobs with and without the block
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
"""Level of :mod:`logging` for reft's lines on stderr; INFO by default. In trainers, the script's
own logging decides by default."""
ENV_CLUSTER = "REFT_LOCAL_CLUSTER"
"""``<token>:<node id>`` in every process of a local cluster, including forked ones."""
ENV_ROOM = "REFT_ROOM"
"""Reserves space in the memory area in which the kernel shows the environment of a fork server."""

# Variables of other programs

ENV_INTERFACE = "GLOO_SOCKET_IFNAME"  # The network interface, as for torch's gloo
ENV_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # File for the error that ended a trainer
ENV_EXTENSIONS = "TORCH_EXTENSIONS_DIR"  # Root of torch's folder of compiled operators
