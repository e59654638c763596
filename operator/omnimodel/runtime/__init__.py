"""What runs inside a model's process: the SDK for handlers, the engines, publishing, and the HTTP server on a socket.

The zygote forks a process, the sandbox closes around it, and `serve.run` takes over: commands of the agent come
over the control channel, requests over a UNIX socket. Handlers import `sdk` and nothing else of this room.
"""
