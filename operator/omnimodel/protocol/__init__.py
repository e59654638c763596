"""Messages between agent, model processes, gateway and operator. Everyone may import it; it imports only errors.

`channel` carries messages with file descriptors between the agent and one model process, `process` has those
messages, `dispatch` is what a gateway asks of an agent, and `admin` what the command line asks of it.
"""
