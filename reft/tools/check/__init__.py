"""Which of a job's nodes is slow or hangs, before a job is started on them."""
