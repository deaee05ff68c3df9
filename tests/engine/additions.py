"""What AWS does and ministack 1.5.33 does not, for the calls of the stack.

ministack deletes a subnet that still holds a network interface, knows no node group update, and an EKS cluster of it
has neither network interfaces nor a security group of its own. A destroy in the wrong order would then pass. These
rules are put in place inside the running ministack, whose request context (account, region) and stores they share;
they answer with the error codes and sentences of AWS.
"""

from __future__ import annotations

import copy
import json
import re
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote

from ministack.core.responses import get_account_id
from ministack.services import ec2, eks

Response = tuple[int, dict[str, str], bytes]
Parameters = dict[str, Any]

_no_capacity: dict[str, set[str]] = {}
_instances_of: dict[str, list[str]] = {}
_lock = threading.RLock()
_installed = False


def set_capacity(account: str, instance_type: str, *, available: bool) -> None:
    """Whether EC2 has `instance_type` for this account: without it, a node group ends as CREATE_FAILED."""
    missing = _no_capacity.setdefault(account, set())
    (missing.discard if available else missing.add)(instance_type)


def install() -> None:
    global _installed
    if _installed:
        return
    _installed = True
    for action, rule in _EC2_RULES.items():
        ec2._ACTION_MAP[action] = _guarded(ec2._ACTION_MAP[action], rule)
    ec2._ACTION_MAP["DescribeNatGateways"] = _with_nat_addresses(ec2._ACTION_MAP["DescribeNatGateways"])
    eks._create_cluster = _create_cluster(eks._create_cluster)
    eks._delete_cluster = _delete_cluster(eks._delete_cluster)
    eks._create_nodegroup = _create_nodegroup(eks._create_nodegroup)
    eks._delete_nodegroup = _delete_nodegroup(eks._delete_nodegroup)
    eks._handle_request_sync = _with_updates(eks._handle_request_sync)


# --- EC2: what cannot be deleted while something else uses it ---------------------------------------------------------


def _guarded(
    handler: Callable[[Parameters], Response], rule: Callable[[Parameters], Response | None]
) -> Callable[[Parameters], Response]:
    def guarded(parameters: Parameters) -> Response:
        return rule(parameters) or handler(parameters)

    return guarded


def _in_use(what: str, by: str) -> Response:
    return ec2._error(
        "DependencyViolation", f"{what} has a dependent object ({by}) and cannot be deleted.", 400
    )


def _one(parameters: Parameters, name: str) -> str:
    return ec2._p(parameters, name) or ""


def _subnet_in_use(parameters: Parameters) -> Response | None:
    subnet = _one(parameters, "SubnetId")
    what = f"The subnet '{subnet}'"
    for instance in ec2._instances.values():
        if instance["SubnetId"] == subnet and instance["State"]["Name"] != "terminated":
            return _in_use(what, instance["InstanceId"])
    for interface in ec2._network_interfaces.values():
        if interface["SubnetId"] == subnet:
            return _in_use(what, interface["NetworkInterfaceId"])
    for gateway in ec2._nat_gateways.values():
        if gateway["SubnetId"] == subnet and gateway["State"] != "deleted":
            return _in_use(what, gateway["NatGatewayId"])
    return None


def _security_group_in_use(parameters: Parameters) -> Response | None:
    group = _one(parameters, "GroupId")
    what = f"resource {group}"
    for interface in ec2._network_interfaces.values():
        if any(one["GroupId"] == group for one in interface["Groups"]):
            return _in_use(what, interface["NetworkInterfaceId"])
    for instance in ec2._instances.values():
        used = instance["State"]["Name"] != "terminated"
        if used and any(one["GroupId"] == group for one in instance["SecurityGroups"]):
            return _in_use(what, instance["InstanceId"])
    for other in ec2._security_groups.values():
        rules = [*other["IpPermissions"], *other["IpPermissionsEgress"]]
        named = {pair.get("GroupId") for rule in rules for pair in rule.get("UserIdGroupPairs", [])}
        if other["GroupId"] != group and group in named:
            return _in_use(what, other["GroupId"])
    return None


def _vpc_in_use(parameters: Parameters) -> Response | None:
    vpc = _one(parameters, "VpcId")
    what = f"The vpc '{vpc}'"
    for endpoint in ec2._vpc_endpoints.values():
        if endpoint["VpcId"] == vpc:
            return _in_use(what, endpoint["VpcEndpointId"])
    for gateway in ec2._nat_gateways.values():
        if gateway["VpcId"] == vpc and gateway["State"] != "deleted":
            return _in_use(what, gateway["NatGatewayId"])
    for table in ec2._route_tables.values():
        main = any(one.get("Main") for one in table.get("Associations", []))
        if table["VpcId"] == vpc and not main:
            return _in_use(what, table["RouteTableId"])
    return None


def _internet_gateway_in_use(parameters: Parameters) -> Response | None:
    gateway = ec2._internet_gateways.get(_one(parameters, "InternetGatewayId"))
    if gateway and gateway.get("Attachments"):
        return _in_use(
            f"The internetGateway '{gateway['InternetGatewayId']}'", gateway["Attachments"][0]["VpcId"]
        )
    return None


def _public_addresses_mapped(parameters: Parameters) -> Response | None:
    vpc = _one(parameters, "VpcId")
    for gateway in ec2._nat_gateways.values():
        if gateway["VpcId"] == vpc and gateway["State"] != "deleted" and gateway["AllocationId"]:
            return ec2._error(
                "DependencyViolation",
                f"Network {vpc} has some mapped public address(es). Please unmap those public address(es) before "
                "detaching the gateway.",
                400,
            )
    return None


def _address_in_use(parameters: Parameters) -> Response | None:
    address = _one(parameters, "AllocationId")
    for gateway in ec2._nat_gateways.values():
        if gateway["AllocationId"] == address and gateway["State"] != "deleted":
            return ec2._error(
                "InvalidIPAddress.InUse", f"Address {address} is in use by {gateway['NatGatewayId']}.", 400
            )
    return None


def _address_unusable(parameters: Parameters) -> Response | None:
    address = _one(parameters, "AllocationId")
    if address and address not in ec2._addresses:
        return ec2._error(
            "InvalidAllocationID.NotFound", f"The allocation ID '{address}' does not exist", 400
        )
    for gateway in ec2._nat_gateways.values():
        if address and gateway["AllocationId"] == address and gateway["State"] != "deleted":
            return ec2._error(
                "Resource.AlreadyAssociated", f"Elastic IP address [{address}] is already associated", 400
            )
    return None


def _route_table_in_use(parameters: Parameters) -> Response | None:
    table = ec2._route_tables.get(_one(parameters, "RouteTableId"))
    if table and table["Associations"]:
        used_by = table["Associations"][0]["RouteTableAssociationId"]
        return _in_use(f"The routeTable '{table['RouteTableId']}'", used_by)
    return None


def _placement_group_in_use(parameters: Parameters) -> Response | None:
    name = _one(parameters, "GroupName")
    for instance in ec2._instances.values():
        if instance["State"]["Name"] != "terminated" and instance["Placement"].get("GroupName") == name:
            return ec2._error(
                "InvalidPlacementGroup.InUse",
                f"The placement group '{name}' is in use and may not be deleted.",
                400,
            )
    return None


def _duplicate_association(parameters: Parameters) -> Response | None:
    subnet = _one(parameters, "SubnetId")
    for table in ec2._route_tables.values():
        for one in table["Associations"]:
            if subnet and one.get("SubnetId") == subnet:
                return ec2._error(
                    "Resource.AlreadyAssociated",
                    f"the specified association for route table {table['RouteTableId']} conflicts with an existing "
                    "association",
                    400,
                )
    return None


def _subnet_conflict(parameters: Parameters) -> Response | None:
    import ipaddress

    vpc = ec2._vpcs.get(_one(parameters, "VpcId"))
    block = ipaddress.ip_network(_one(parameters, "CidrBlock"))
    if vpc is None:
        return None
    if not block.subnet_of(ipaddress.ip_network(vpc["CidrBlock"])):  # pyright: ignore[reportArgumentType]
        return ec2._error("InvalidSubnet.Range", f"The CIDR '{block}' is invalid.", 400)
    for subnet in ec2._subnets.values():
        if subnet["VpcId"] == vpc["VpcId"] and block.overlaps(ipaddress.ip_network(subnet["CidrBlock"])):
            return ec2._error(
                "InvalidSubnet.Conflict", f"The CIDR '{block}' conflicts with another subnet", 400
            )
    return None


_EC2_RULES: dict[str, Callable[[Parameters], Response | None]] = {
    "AssociateRouteTable": _duplicate_association,
    "CreateNatGateway": _address_unusable,
    "CreateSubnet": _subnet_conflict,
    "DeleteInternetGateway": _internet_gateway_in_use,
    "DeletePlacementGroup": _placement_group_in_use,
    "DeleteRouteTable": _route_table_in_use,
    "DeleteSecurityGroup": _security_group_in_use,
    "DeleteSubnet": _subnet_in_use,
    "DeleteVpc": _vpc_in_use,
    "DetachInternetGateway": _public_addresses_mapped,
    "ReleaseAddress": _address_in_use,
}


def _with_nat_addresses(handler: Callable[[Parameters], Response]) -> Callable[[Parameters], Response]:
    """The addresses of each NAT gateway, which ministack leaves out."""

    def described(parameters: Parameters) -> Response:
        status, headers, body = handler(parameters)
        text = body.decode()
        for gateway in ec2._nat_gateways.values():
            address = ec2._addresses.get(gateway["AllocationId"], {})
            entry = (
                "<natGatewayAddressSet><item>"
                f"<allocationId>{gateway['AllocationId']}</allocationId>"
                f"<publicIp>{address.get('PublicIp', '')}</publicIp><privateIp>10.0.0.10</privateIp>"
                f"<networkInterfaceId>eni-{gateway['NatGatewayId'][4:]}</networkInterfaceId>"
                "</item></natGatewayAddressSet>"
            )
            pattern = rf"(<natGatewayId>{gateway['NatGatewayId']}</natGatewayId>(?:(?!</?natGatewayId>).)*?)"
            text = re.sub(
                pattern + "<natGatewayAddressSet ?/>", lambda m, e=entry: m[1] + e, text, flags=re.S
            )
        return status, headers, text.encode()

    return described


# --- EKS: what a cluster and its nodes occupy -------------------------------------------------------------------------


def _ok(**answer: Any) -> Response:
    return eks._json_resp(200, answer)


def _interface(subnet: str, description: str, groups: list[str]) -> None:
    identifier = f"eni-{uuid.uuid4().hex[:17]}"
    ec2._network_interfaces[identifier] = {
        "NetworkInterfaceId": identifier,
        "SubnetId": subnet,
        "VpcId": ec2._subnets[subnet]["VpcId"],
        "AvailabilityZone": ec2._subnets[subnet]["AvailabilityZone"],
        "Description": description,
        "OwnerId": get_account_id(),
        "Status": "in-use",
        "PrivateIpAddress": "10.0.0.20",
        "InterfaceType": "interface",
        "SourceDestCheck": True,
        "MacAddress": "02:00:00:00:00:00",
        "Groups": [{"GroupId": group, "GroupName": group} for group in groups],
        "Attachment": None,
    }


def _create_cluster(original: Callable[..., Response]) -> Callable[..., Response]:
    def create(body: dict[str, Any], creator: str | None = None) -> Response:
        network = body.get("resourcesVpcConfig", {})
        subnets = network.get("subnetIds", [])
        unknown = [one for one in subnets if one not in ec2._subnets]
        if unknown:
            return eks._error(
                400, "InvalidParameterException", f"The subnet ID '{unknown[0]}' does not exist"
            )
        if len({ec2._subnets[one]["AvailabilityZone"] for one in subnets}) < 2:
            return eks._error(
                400, "InvalidParameterException", "Subnets specified must be in at least two different AZs"
            )
        response = original(body, creator)
        if response[0] != 200:
            return response
        cluster = eks._clusters[body["name"]]
        vpc = ec2._subnets[subnets[0]]["VpcId"]
        group = f"sg-{uuid.uuid4().hex[:17]}"
        everything = {
            "IpProtocol": "-1",
            "IpRanges": [],
            "Ipv6Ranges": [],
            "PrefixListIds": [],
            "UserIdGroupPairs": [],
        }
        itself = {**everything, "UserIdGroupPairs": [{"GroupId": group, "UserId": get_account_id()}]}
        ec2._security_groups[group] = {
            "GroupId": group,
            "GroupName": f"eks-cluster-sg-{body['name']}-1",
            "Description": "EKS created security group applied to ENI that is attached to EKS Control Plane",
            "VpcId": vpc,
            "OwnerId": get_account_id(),
            "IpPermissions": [copy.deepcopy(itself)],
            "IpPermissionsEgress": [
                {**everything, "IpRanges": [{"CidrIp": "0.0.0.0/0"}]},
                copy.deepcopy(itself),
            ],
        }
        ec2._tags[group] = [{"Key": f"kubernetes.io/cluster/{body['name']}", "Value": "owned"}]
        for subnet in subnets[:2]:
            _interface(subnet, f"Amazon EKS {body['name']}", [group, *network.get("securityGroupIds", [])])
        cluster["resourcesVpcConfig"] |= {"vpcId": vpc, "clusterSecurityGroupId": group}
        cluster["certificateAuthority"]["data"] = "dGVzdA=="
        cluster["upgradePolicy"] = body.get("upgradePolicy", {"supportType": "EXTENDED"})
        cluster["deletionProtection"] = body.get("deletionProtection", False)
        mode = body.get("accessConfig", {}).get("authenticationMode", "CONFIG_MAP")
        cluster["accessConfig"] = {**body.get("accessConfig", {}), "authenticationMode": mode}
        return _ok(cluster=eks._sanitize(cluster))

    return create


def _delete_cluster(original: Callable[..., Response]) -> Callable[..., Response]:
    def delete(name: str) -> Response:
        cluster = eks._clusters.get(name)
        if cluster is None:
            return original(name)
        if any(key.startswith(f"{name}/") for key in eks._nodegroups):
            return eks._error(409, "ResourceInUseException", "Cluster has nodegroups attached")
        if cluster.get("deletionProtection"):
            return eks._error(
                400,
                "InvalidRequestException",
                f"Cluster {name} has deletion protection enabled: disable it first",
            )
        group = cluster["resourcesVpcConfig"]["clusterSecurityGroupId"]
        for key in [key for key in eks._addons if key.startswith(f"{name}/")]:
            eks._addons.pop(key)
        response = original(name)
        mine = f"Amazon EKS {name}"
        for key in [key for key, one in ec2._network_interfaces.items() if one["Description"] == mine]:
            del ec2._network_interfaces[key]
        ec2._security_groups.pop(group, None)
        ec2._tags.pop(group, None)
        return response

    return delete


def _template(body: dict[str, Any]) -> dict[str, Any] | None:
    """The data of the launch template version that the node group names."""
    wanted = body.get("launchTemplate")
    if not wanted:
        return {}
    for template in ec2._launch_templates.values():
        if (
            wanted.get("id") == template["LaunchTemplateId"]
            or wanted.get("name") == template["LaunchTemplateName"]
        ):
            version = str(wanted.get("version") or template["DefaultVersionNumber"])
            for one in template["Versions"]:
                if str(one["VersionNumber"]) == version:
                    return one["LaunchTemplateData"]
    return None


def _create_nodegroup(original: Callable[..., Response]) -> Callable[..., Response]:
    def create(cluster: str, body: dict[str, Any]) -> Response:
        template = _template(body)
        if template is None:
            return eks._error(
                400, "InvalidParameterException", "The specified launch template does not exist."
            )
        types = body.get("instanceTypes") or []
        if types and template.get("InstanceType"):
            return eks._error(
                400,
                "InvalidParameterException",
                "Cannot specify instance types in launch template and API request",
            )
        unknown = [one for one in body.get("subnets", []) if one not in ec2._subnets]
        if unknown:
            return eks._error(
                400, "InvalidParameterException", f"The subnet ID '{unknown[0]}' does not exist"
            )
        response = original(cluster, body)
        if response[0] != 200:
            return response
        group = eks._nodegroups[f"{cluster}/{body['nodegroupName']}"]
        group["instanceTypes"] = types
        group["launchTemplate"] = body.get("launchTemplate")
        group["updateConfig"] = body.get("updateConfig") or {"maxUnavailable": 1}
        group["nodeRepairConfig"] = body.get("nodeRepairConfig") or {"enabled": False}
        group["_instanceType"] = template.get("InstanceType") or (types or ["t3.medium"])[0]
        group["_groups"] = _node_security_groups(cluster, template)
        group["_placement"] = template.get("Placement", {}).get("GroupName")
        group["releaseVersion"] = body.get("releaseVersion") or f"{group['version']}.0-20261101"
        _fill(group)
        return _ok(nodegroup=eks._sanitize(group))

    return create


def _node_security_groups(cluster: str, template: dict[str, Any]) -> list[str]:
    named = [
        group
        for one in template.get("NetworkInterfaces", [])
        for group in one.get("Groups", one.get("SecurityGroupIds", []))
    ]
    own = eks._clusters[cluster]["resourcesVpcConfig"]["clusterSecurityGroupId"]
    return list(dict.fromkeys(named)) or [*template.get("SecurityGroupIds", [])] or [own]


def _fill(group: dict[str, Any]) -> None:
    """Starts or terminates instances until there are as many as wanted."""
    with _lock:
        running = _instances_of.setdefault(group["nodegroupArn"], [])
        wanted = group["scalingConfig"].get("desiredSize", 0)
        if wanted > len(running) and group["_instanceType"] in _no_capacity.get(get_account_id(), ()):
            group["status"] = "CREATE_FAILED" if not running else "DEGRADED"
            group["health"] = {
                "issues": [
                    {
                        "code": "AsgInstanceLaunchFailures",
                        "message": "Could not launch On-Demand Instances. InsufficientInstanceCapacity - We currently "
                        f"do not have sufficient {group['_instanceType']} capacity in the Availability Zone you "
                        "requested. Our system will be working on provisioning additional capacity.",
                        "resourceIds": [group["resources"]["autoScalingGroups"][0]["name"]],
                    }
                ]
            }
            return
        while len(running) < wanted:
            subnet = group["subnets"][len(running) % len(group["subnets"])]
            instance = ec2._launch_instances_internal(
                "ami-eks", group["_instanceType"], subnet, 1, sg_ids=group["_groups"]
            )[0]
            instance["Placement"] |= {
                "AvailabilityZone": ec2._subnets[subnet]["AvailabilityZone"],
                **({"GroupName": group["_placement"]} if group["_placement"] else {}),
            }
            tags = {
                **group["tags"],
                "eks:cluster-name": group["clusterName"],
                "eks:nodegroup-name": group["nodegroupName"],
                f"kubernetes.io/cluster/{group['clusterName']}": "owned",
            }
            ec2._tags[instance["InstanceId"]] = [{"Key": key, "Value": value} for key, value in tags.items()]
            running.append(instance["InstanceId"])
        while len(running) > wanted:
            ec2._discard_instance_records(ec2._instances[running.pop()])
        group["status"], group["health"] = "ACTIVE", {"issues": []}


def _delete_nodegroup(original: Callable[..., Response]) -> Callable[..., Response]:
    def delete(cluster: str, name: str) -> Response:
        group = eks._nodegroups.get(f"{cluster}/{name}")
        if group is not None:
            group["scalingConfig"] = {**group["scalingConfig"], "desiredSize": 0}
            _fill(group)
        return original(cluster, name)

    return delete


def _with_updates(original: Callable[..., Response]) -> Callable[..., Response]:
    """UpdateNodegroupConfig, UpdateNodegroupVersion, UpdateClusterConfig, UpdateClusterVersion and DescribeUpdate."""

    def handle(method: str, path: str, headers: Any, body: bytes, query: dict[str, Any]) -> Response:
        match = re.fullmatch(r"/clusters/([\w-]+)/node-groups/([\w-]+)/(update-config|update-version)", path)
        if match and method == "POST":
            return _update_nodegroup(match[1], match[2], match[3], json.loads(body or b"{}"))
        match = re.fullmatch(r"/clusters/([\w-]+)/(update-config|updates)", path)
        if match and method == "POST":
            return _update_cluster(match[1], json.loads(body or b"{}"))
        match = re.fullmatch(r"/clusters/([\w-]+)/updates/([\w-]+)", path)
        if match and method == "GET":
            return _ok(update={"id": match[2], "status": "Successful", "type": "ConfigUpdate", "errors": []})
        match = re.fullmatch(r"/tags/(arn:aws:eks:.*:podidentityassociation/.+)", unquote(path))
        if match:
            return _tag_association(match[1], method, json.loads(body or b"{}"), query)
        return original(method, path, headers, body, query)

    return handle


def _tag_association(arn: str, method: str, body: dict[str, Any], query: dict[str, Any]) -> Response:
    """ministack knows tags of all EKS resources but these."""
    for association in eks._pod_identity_associations.values():
        if association["associationArn"] == arn:
            tags = association.setdefault("tags", {})
            tags.update(body.get("tags", {}))
            for key in query.get("tagKeys", []) if method == "DELETE" else []:
                tags.pop(key, None)
            return _ok(tags=tags) if method == "GET" else _ok()
    return eks._error(404, "NotFoundException", f"The specified resource could not be found: {arn}")


def _roll(group: dict[str, Any]) -> None:
    """New instances by the new version of the launch template, the old ones go."""
    template = _template(group) or {}
    group["_instanceType"] = template.get("InstanceType") or group["_instanceType"]
    group["_groups"] = _node_security_groups(group["clusterName"], template)
    group["_placement"] = template.get("Placement", {}).get("GroupName")
    with _lock:
        running = _instances_of[group["nodegroupArn"]]
        while running:
            ec2._discard_instance_records(ec2._instances[running.pop()])
        _fill(group)


def _updated() -> Response:
    now = time.time()
    return _ok(
        update={"id": str(uuid.uuid4()), "status": "InProgress", "type": "ConfigUpdate", "createdAt": now}
    )


def _update_nodegroup(cluster: str, name: str, what: str, body: dict[str, Any]) -> Response:
    group = eks._nodegroups.get(f"{cluster}/{name}")
    if group is None:
        return eks._error(404, "ResourceNotFoundException", f"No node group found for name: {name}.")
    if what == "update-version":
        if body.get("launchTemplate") and _template(body) is None:
            return eks._error(
                400, "InvalidParameterException", "The specified launch template does not exist."
            )
        release = body.get("releaseVersion")
        if release and _dated(release) < _dated(group["releaseVersion"]):
            # UpdateNodegroupVersion: "You cannot roll back a node group to an earlier [...] AMI version".
            return eks._error(
                400,
                "InvalidParameterException",
                f"Release version {release} is earlier than {group['releaseVersion']} of the node group.",
            )
        for key in ("version", "releaseVersion", "launchTemplate"):
            if body.get(key):
                group[key] = body[key]
        if body.get("version") and not body.get("releaseVersion"):
            group["releaseVersion"] = f"{body['version']}.0-20261101"
        _roll(group)
        return _updated()
    group["scalingConfig"] = {**group["scalingConfig"], **body.get("scalingConfig", {})}
    group["labels"] = {**group["labels"], **body.get("labels", {}).get("addOrUpdateLabels", {})}
    for label in body.get("labels", {}).get("removeLabels", []):
        group["labels"].pop(label, None)
    taints = {(one["key"], one["effect"]): one for one in group["taints"]}
    for one in body.get("taints", {}).get("removeTaints", []):
        taints.pop((one["key"], one["effect"]), None)
    for one in body.get("taints", {}).get("addOrUpdateTaints", []):
        taints[(one["key"], one["effect"])] = one
    group["taints"] = list(taints.values())
    for key in ("updateConfig", "nodeRepairConfig"):
        if body.get(key):
            group[key] = body[key]
    _fill(group)
    return _updated()


def _dated(release: str) -> tuple[int, ...]:
    """``1.35.0-20260714`` in its order."""
    return tuple(int(part) for part in re.split(r"[.-]", release))


def _update_cluster(name: str, body: dict[str, Any]) -> Response:
    cluster = eks._clusters.get(name)
    if cluster is None:
        return eks._error(404, "ResourceNotFoundException", f"No cluster found for name: {name}.")
    if "version" in body:
        old, new = (tuple(map(int, version.split("."))) for version in (cluster["version"], body["version"]))
        if new < old or new > (old[0], old[1] + 1):
            return eks._error(
                400,
                "InvalidParameterException",
                f"Unsupported Kubernetes minor version update from {cluster['version']} to {body['version']}",
            )
        cluster["version"] = body["version"]
    subnets = body.get("resourcesVpcConfig", {}).get("subnetIds", [])
    elsewhere = [
        one for one in subnets if ec2._subnets[one]["VpcId"] != cluster["resourcesVpcConfig"]["vpcId"]
    ]
    if elsewhere:
        message = f"The subnets {elsewhere} do not belong to the VPC of the cluster"
        return eks._error(400, "InvalidParameterException", message)
    cluster["resourcesVpcConfig"] |= body.get("resourcesVpcConfig", {})
    cluster["accessConfig"] |= body.get("accessConfig", {})
    for key in ("logging", "upgradePolicy", "deletionProtection"):
        if key in body:
            cluster[key] = body[key]
    return _updated()
