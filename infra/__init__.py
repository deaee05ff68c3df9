"""The Pulumi program: from an empty AWS account to a RayCluster that trains over EFA."""
