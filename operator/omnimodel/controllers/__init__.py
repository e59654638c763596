"""The reconcile loop: snapshot -> plan -> diff -> apply, for one machine (`local`) and for a cluster (`kubernetes`).

`local` reads the manifests of a folder, decides with `placement`, renders with `render`, hands the desired processes
to an agent, and composes each object's status from what the agent reports. Only `cli` may import this room.
"""
