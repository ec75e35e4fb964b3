"""Integration of etcd as the rendezvous store: ``reft launch --rdzv-backend etcd-v3``.

:mod:`reft.integrations` describes integrations. This one needs reft's optional dependencies
``etcd``.
"""

RENDEZVOUS = {"etcd-v3": "reft_etcd.backend:EtcdBackend"}
