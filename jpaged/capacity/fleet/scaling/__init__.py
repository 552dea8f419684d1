"""How many replicas there are: the autoscaler of Kubernetes over simulated pods.

autoscaler.py    its rules
deploy_files.py  what deploy/ sets them to
"""
