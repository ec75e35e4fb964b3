"""An etcd cluster as the rendezvous store (extra ``etcd``)."""
