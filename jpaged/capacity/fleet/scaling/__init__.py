"""Number of replicas: the autoscaler of Kubernetes over simulated pods.

autoscaler.py    its rules
deploy_files.py  its settings, from deploy/
"""
