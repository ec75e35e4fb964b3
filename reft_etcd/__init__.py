"""Jobs whose nodes meet at an etcd cluster: ``reft launch --rdzv-backend etcd-v3``.

An integration as :mod:`reft.integrations` describes them. It needs the extra ``etcd``.
"""

RENDEZVOUS = {"etcd-v3": "reft_etcd.backend:EtcdBackend"}
