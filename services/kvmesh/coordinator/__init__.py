"""The transfer coordinator: who is in the mesh, and what became of every KV transfer.

Nothing waits for it: members report to it and watch it, and serve on when it is gone.

``registry``  members, leases, epochs and the history of changes (pure)
``ledger``    what both sides of every transfer said (pure)
``storage``   TensorRT-LLM's cluster storage: keys with a time to live
``cluster``   whether the mesh is complete enough to serve (pure)
``state``     what of these survives the process, as keys and values (pure)
``etcd``      the etcd client
``mirror``    writes what has changed of the state to etcd
``succession`` which of several coordinators leads
``app``       the HTTP faces over all of these
``main``      the process
"""
