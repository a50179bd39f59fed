"""Where arrays lie: the mesh of devices, the tables that divide arrays over it, and the processes of one run.

In come the mesh's sizes from the configuration and trees of arrays or of shapes; out go the same trees placed on devices.
No other room names a device or opens a connection between processes.
"""
