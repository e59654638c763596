"""The supervisor of one pod or machine: starts models' processes, owns device memory, holds requests, reports.

`agent.Agent` is what controllers and gateways use. `preparation` gets a model's image ready, `instance` is one
revision of one model with its process and bytes, `broker` decides and carries out who is woken and who leaves,
`ingress` holds requests until their model is resident. `zygotes`, `process`, `limits`, `sources` and `environments`
are the hands.
"""
