"""EC2: network, security groups, placement group, launch template."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, ClassVar

from .base import Cloud, Resource, Values, register, tag_list, upper, wait


def _specification(kind: str, inputs: Values) -> list[dict[str, Any]]:
    tags = inputs.get("tagsAll") or {}
    return [{"ResourceType": kind, "Tags": tag_list(tags)}] if tags else []


class _Tagged(Resource):
    def retag(self, cloud: Cloud, id: str, state: Values, removed: list[str], added: dict[str, str]) -> None:
        if removed:
            cloud.ec2.delete_tags(
                Resources=[self.tag_target(id, state)], Tags=[{"Key": key} for key in removed]
            )
        if added:
            cloud.ec2.create_tags(Resources=[self.tag_target(id, state)], Tags=tag_list(added))

    def tag_target(self, id: str, state: Values) -> str:
        return id


@register
class Vpc(_Tagged):
    token = "aws:ec2/vpc:Vpc"
    replace_on = ("cidrBlock",)
    defaults: ClassVar[Mapping[str, Any]] = {"enableDnsSupport": True, "instanceTenancy": "default"}
    gone = ("InvalidVpcID.NotFound",)

    def create(self, cloud: Cloud, inputs: Values) -> str:
        answer = cloud.ec2.create_vpc(
            CidrBlock=inputs["cidrBlock"],
            InstanceTenancy=inputs["instanceTenancy"],
            TagSpecifications=_specification("vpc", inputs),
        )
        return answer["Vpc"]["VpcId"]

    def finish(self, cloud: Cloud, id: str, inputs: Values) -> None:
        wait(lambda: self._describe(cloud, id), lambda one: one["State"] == "available", id)
        self._attributes(cloud, id, inputs)

    def _attributes(self, cloud: Cloud, id: str, inputs: Values) -> None:
        cloud.ec2.modify_vpc_attribute(
            VpcId=id, EnableDnsSupport={"Value": inputs.get("enableDnsSupport", True)}
        )
        cloud.ec2.modify_vpc_attribute(
            VpcId=id, EnableDnsHostnames={"Value": inputs.get("enableDnsHostnames", False)}
        )

    def _describe(self, cloud: Cloud, id: str) -> Any:
        return cloud.ec2.describe_vpcs(VpcIds=[id])["Vpcs"][0]

    def read(self, cloud: Cloud, id: str, inputs: Values) -> Values:
        found = self._describe(cloud, id)
        main = {"Name": "vpc-id", "Values": [id]}
        tables = cloud.ec2.describe_route_tables(Filters=[main])["RouteTables"]
        groups = cloud.ec2.describe_security_groups(Filters=[main])["SecurityGroups"]
        hostnames = cloud.ec2.describe_vpc_attribute(VpcId=id, Attribute="enableDnsHostnames")
        return {
            "arn": cloud.arn("ec2", f"vpc/{id}"),
            "cidrBlock": found["CidrBlock"],
            "dhcpOptionsId": found.get("DhcpOptionsId", ""),
            "enableDnsHostnames": hostnames["EnableDnsHostnames"]["Value"],
            "mainRouteTableId": next((one["RouteTableId"] for one in tables), ""),
            "defaultRouteTableId": next((one["RouteTableId"] for one in tables), ""),
            "defaultSecurityGroupId": next(
                (one["GroupId"] for one in groups if one["GroupName"] == "default"), ""
            ),
            "ownerId": cloud.account,
        }

    def update(self, cloud: Cloud, id: str, old: Values, new: Values) -> None:
        self._attributes(cloud, id, new)

    def delete(self, cloud: Cloud, id: str, state: Values) -> None:
        cloud.ec2.delete_vpc(VpcId=id)


@register
class Subnet(_Tagged):
    token = "aws:ec2/subnet:Subnet"
    replace_on = ("vpcId", "cidrBlock", "availabilityZone", "availabilityZoneId", "outpostArn")
    gone = ("InvalidSubnetID.NotFound",)

    def create(self, cloud: Cloud, inputs: Values) -> str:
        arguments = {"CidrBlock": inputs["cidrBlock"], "VpcId": inputs["vpcId"]}
        for name in ("availabilityZone", "availabilityZoneId"):
            if inputs.get(name):
                arguments[name[0].upper() + name[1:]] = inputs[name]
        answer = cloud.ec2.create_subnet(**arguments, TagSpecifications=_specification("subnet", inputs))
        return answer["Subnet"]["SubnetId"]

    def finish(self, cloud: Cloud, id: str, inputs: Values) -> None:
        wait(lambda: self._describe(cloud, id), lambda one: one["State"] == "available", id)
        if inputs.get("mapPublicIpOnLaunch"):
            cloud.ec2.modify_subnet_attribute(SubnetId=id, MapPublicIpOnLaunch={"Value": True})

    def _describe(self, cloud: Cloud, id: str) -> Any:
        return cloud.ec2.describe_subnets(SubnetIds=[id])["Subnets"][0]

    def read(self, cloud: Cloud, id: str, inputs: Values) -> Values:
        found = self._describe(cloud, id)
        return {
            "arn": cloud.arn("ec2", f"subnet/{id}"),
            "vpcId": found["VpcId"],
            "cidrBlock": found["CidrBlock"],
            "availabilityZone": found["AvailabilityZone"],
            "availabilityZoneId": found.get("AvailabilityZoneId", ""),
            "mapPublicIpOnLaunch": found["MapPublicIpOnLaunch"],
            "ownerId": cloud.account,
        }

    def update(self, cloud: Cloud, id: str, old: Values, new: Values) -> None:
        cloud.ec2.modify_subnet_attribute(
            SubnetId=id, MapPublicIpOnLaunch={"Value": new.get("mapPublicIpOnLaunch", False)}
        )

    def delete(self, cloud: Cloud, id: str, state: Values) -> None:
        cloud.ec2.delete_subnet(SubnetId=id)


@register
class InternetGateway(_Tagged):
    token = "aws:ec2/internetGateway:InternetGateway"
    gone = ("InvalidInternetGatewayID.NotFound",)

    def create(self, cloud: Cloud, inputs: Values) -> str:
        answer = cloud.ec2.create_internet_gateway(
            TagSpecifications=_specification("internet-gateway", inputs)
        )
        return answer["InternetGateway"]["InternetGatewayId"]

    def finish(self, cloud: Cloud, id: str, inputs: Values) -> None:
        attached = self._describe(cloud, id)["Attachments"]
        if inputs.get("vpcId") and not attached:
            cloud.ec2.attach_internet_gateway(InternetGatewayId=id, VpcId=inputs["vpcId"])

    def _describe(self, cloud: Cloud, id: str) -> Any:
        return cloud.ec2.describe_internet_gateways(InternetGatewayIds=[id])["InternetGateways"][0]

    def read(self, cloud: Cloud, id: str, inputs: Values) -> Values:
        found = self._describe(cloud, id)
        return {
            "arn": cloud.arn("ec2", f"internet-gateway/{id}"),
            "vpcId": next((one["VpcId"] for one in found["Attachments"]), ""),
            "ownerId": cloud.account,
        }

    def update(self, cloud: Cloud, id: str, old: Values, new: Values) -> None:
        if old.get("vpcId") != new.get("vpcId") and old.get("vpcId"):
            cloud.ec2.detach_internet_gateway(InternetGatewayId=id, VpcId=old["vpcId"])

    def delete(self, cloud: Cloud, id: str, state: Values) -> None:
        attached = self._describe(cloud, id)["Attachments"]
        if attached:
            cloud.ec2.detach_internet_gateway(InternetGatewayId=id, VpcId=attached[0]["VpcId"])
        cloud.ec2.delete_internet_gateway(InternetGatewayId=id)


@register
class Eip(_Tagged):
    token = "aws:ec2/eip:Eip"
    replace_on = ("domain", "publicIpv4Pool", "networkBorderGroup")
    gone = ("InvalidAllocationID.NotFound",)

    def create(self, cloud: Cloud, inputs: Values) -> str:
        answer = cloud.ec2.allocate_address(
            Domain="vpc", TagSpecifications=_specification("elastic-ip", inputs)
        )
        return answer["AllocationId"]

    def read(self, cloud: Cloud, id: str, inputs: Values) -> Values:
        found = cloud.ec2.describe_addresses(AllocationIds=[id])["Addresses"][0]
        return {
            "arn": cloud.arn("ec2", f"elastic-ip/{id}"),
            "allocationId": id,
            "publicIp": found["PublicIp"],
            "publicDns": f"ec2-{found['PublicIp'].replace('.', '-')}.{cloud.region}.compute.amazonaws.com",
            "domain": "vpc",
        }

    def delete(self, cloud: Cloud, id: str, state: Values) -> None:
        cloud.ec2.release_address(AllocationId=id)


@register
class NatGateway(_Tagged):
    token = "aws:ec2/natGateway:NatGateway"
    replace_on = ("subnetId", "allocationId", "connectivityType", "privateIp")
    defaults: ClassVar[Mapping[str, Any]] = {"connectivityType": "public"}
    gone = ("NatGatewayNotFound",)

    def create(self, cloud: Cloud, inputs: Values) -> str:
        arguments = {"AllocationId": inputs["allocationId"]} if inputs.get("allocationId") else {}
        answer = cloud.ec2.create_nat_gateway(
            SubnetId=inputs["subnetId"],
            ConnectivityType=inputs["connectivityType"],
            TagSpecifications=_specification("natgateway", inputs),
            **arguments,
        )
        return answer["NatGateway"]["NatGatewayId"]

    def finish(self, cloud: Cloud, id: str, inputs: Values) -> None:
        wait(lambda: self._describe(cloud, id), lambda one: one["State"] == "available", id)

    def _describe(self, cloud: Cloud, id: str) -> Any:
        return cloud.ec2.describe_nat_gateways(NatGatewayIds=[id])["NatGateways"][0]

    def read(self, cloud: Cloud, id: str, inputs: Values) -> Values | None:
        found = self._describe(cloud, id)
        if found["State"] == "deleted":
            return None
        address = (found["NatGatewayAddresses"] or [{}])[0]
        return {
            "subnetId": found["SubnetId"],
            "publicIp": address.get("PublicIp", ""),
            "privateIp": address.get("PrivateIp", ""),
            "networkInterfaceId": address.get("NetworkInterfaceId", ""),
        }

    def delete(self, cloud: Cloud, id: str, state: Values) -> None:
        cloud.ec2.delete_nat_gateway(NatGatewayId=id)
        wait(lambda: self._describe(cloud, id), lambda one: one["State"] == "deleted", f"deletion of {id}")


_ROUTE_TARGETS = {
    "gatewayId": "GatewayId",
    "natGatewayId": "NatGatewayId",
    "vpcEndpointId": "VpcEndpointId",
    "networkInterfaceId": "NetworkInterfaceId",
    "transitGatewayId": "TransitGatewayId",
}


def _route(inputs: Values) -> dict[str, Any]:
    return {theirs: inputs[ours] for ours, theirs in _ROUTE_TARGETS.items() if inputs.get(ours)}


@register
class RouteTable(_Tagged):
    token = "aws:ec2/routeTable:RouteTable"
    replace_on = ("vpcId",)
    gone = ("InvalidRouteTableID.NotFound",)

    def create(self, cloud: Cloud, inputs: Values) -> str:
        answer = cloud.ec2.create_route_table(
            VpcId=inputs["vpcId"], TagSpecifications=_specification("route-table", inputs)
        )
        return answer["RouteTable"]["RouteTableId"]

    def finish(self, cloud: Cloud, id: str, inputs: Values) -> None:
        present = {one.get("DestinationCidrBlock") for one in self._describe(cloud, id)["Routes"]}
        for route in inputs.get("routes") or []:
            if route["cidrBlock"] not in present:
                cloud.ec2.create_route(
                    RouteTableId=id, DestinationCidrBlock=route["cidrBlock"], **_route(route)
                )

    def _describe(self, cloud: Cloud, id: str) -> Any:
        return cloud.ec2.describe_route_tables(RouteTableIds=[id])["RouteTables"][0]

    def read(self, cloud: Cloud, id: str, inputs: Values) -> Values:
        found = self._describe(cloud, id)
        return {
            "arn": cloud.arn("ec2", f"route-table/{id}"),
            "vpcId": found["VpcId"],
            "ownerId": cloud.account,
            "routes": inputs.get("routes") or [],
            "propagatingVgws": [],
        }

    def update(self, cloud: Cloud, id: str, old: Values, new: Values) -> None:
        before = {one["cidrBlock"]: one for one in old.get("routes") or []}
        after = {one["cidrBlock"]: one for one in new.get("routes") or []}
        for block in before.keys() - after.keys():
            cloud.ec2.delete_route(RouteTableId=id, DestinationCidrBlock=block)
        for block, route in after.items():
            if block in before and before[block] != route:
                cloud.ec2.replace_route(RouteTableId=id, DestinationCidrBlock=block, **_route(route))

    def delete(self, cloud: Cloud, id: str, state: Values) -> None:
        cloud.ec2.delete_route_table(RouteTableId=id)


@register
class Route(Resource):
    token = "aws:ec2/route:Route"
    replace_on = (
        "routeTableId",
        "destinationCidrBlock",
        "destinationIpv6CidrBlock",
        "destinationPrefixListId",
    )
    gone = ("InvalidRouteTableID.NotFound", "InvalidRoute.NotFound")

    def create(self, cloud: Cloud, inputs: Values) -> str:
        table, block = inputs["routeTableId"], inputs["destinationCidrBlock"]
        cloud.ec2.create_route(RouteTableId=table, DestinationCidrBlock=block, **_route(inputs))
        return f"r-{table}{int(hashlib.sha256(block.encode()).hexdigest()[:8], 16)}"

    def read(self, cloud: Cloud, id: str, inputs: Values) -> Values | None:
        tables = cloud.ec2.describe_route_tables(RouteTableIds=[inputs["routeTableId"]])["RouteTables"]
        for route in tables[0]["Routes"]:
            if route.get("DestinationCidrBlock") == inputs["destinationCidrBlock"]:
                return {
                    "state": route.get("State", "active"),
                    "origin": "CreateRoute",
                    **_echo(inputs, _ROUTE_TARGETS),
                }
        return None

    def update(self, cloud: Cloud, id: str, old: Values, new: Values) -> None:
        cloud.ec2.replace_route(
            RouteTableId=new["routeTableId"], DestinationCidrBlock=new["destinationCidrBlock"], **_route(new)
        )

    def delete(self, cloud: Cloud, id: str, state: Values) -> None:
        cloud.ec2.delete_route(
            RouteTableId=state["routeTableId"], DestinationCidrBlock=state["destinationCidrBlock"]
        )


def _echo(inputs: Values, names: Mapping[str, str]) -> Values:
    return {name: inputs[name] for name in names if inputs.get(name)}


@register
class RouteTableAssociation(Resource):
    token = "aws:ec2/routeTableAssociation:RouteTableAssociation"
    replace_on = ("subnetId", "gatewayId")
    gone = ("InvalidAssociationID.NotFound", "InvalidRouteTableID.NotFound")

    def create(self, cloud: Cloud, inputs: Values) -> str:
        answer = cloud.ec2.associate_route_table(
            RouteTableId=inputs["routeTableId"], SubnetId=inputs["subnetId"]
        )
        return answer["AssociationId"]

    def read(self, cloud: Cloud, id: str, inputs: Values) -> Values | None:
        mine = [{"Name": "association.route-table-association-id", "Values": [id]}]
        tables = cloud.ec2.describe_route_tables(Filters=mine)["RouteTables"]
        found = [
            one for table in tables for one in table["Associations"] if one["RouteTableAssociationId"] == id
        ]
        return {"routeTableId": found[0]["RouteTableId"], "subnetId": found[0]["SubnetId"]} if found else None

    def update(self, cloud: Cloud, id: str, old: Values, new: Values) -> None:
        # Replacing gives the association another id, so an update that changes nothing must not do it.
        if old.get("routeTableId") != new.get("routeTableId"):
            cloud.ec2.replace_route_table_association(AssociationId=id, RouteTableId=new["routeTableId"])

    def delete(self, cloud: Cloud, id: str, state: Values) -> None:
        cloud.ec2.disassociate_route_table(AssociationId=id)


@register
class VpcEndpoint(_Tagged):
    token = "aws:ec2/vpcEndpoint:VpcEndpoint"
    replace_on = ("vpcId", "serviceName", "vpcEndpointType")
    defaults: ClassVar[Mapping[str, Any]] = {"vpcEndpointType": "Gateway"}
    gone = ("InvalidVpcEndpointId.NotFound", "InvalidVpcEndpoint.NotFound")

    def create(self, cloud: Cloud, inputs: Values) -> str:
        arguments: dict[str, Any] = {
            "VpcId": inputs["vpcId"],
            "ServiceName": inputs["serviceName"],
            "VpcEndpointType": inputs["vpcEndpointType"],
            "TagSpecifications": _specification("vpc-endpoint", inputs),
        }
        for ours, theirs in (
            ("routeTableIds", "RouteTableIds"),
            ("subnetIds", "SubnetIds"),
            ("securityGroupIds", "SecurityGroupIds"),
            ("policy", "PolicyDocument"),
            ("privateDnsEnabled", "PrivateDnsEnabled"),
        ):
            if inputs.get(ours) is not None:
                arguments[theirs] = inputs[ours]
        return cloud.ec2.create_vpc_endpoint(**arguments)["VpcEndpoint"]["VpcEndpointId"]

    def finish(self, cloud: Cloud, id: str, inputs: Values) -> None:
        wait(lambda: self._describe(cloud, id), lambda one: one and one["State"] == "available", id)

    def _describe(self, cloud: Cloud, id: str) -> Any:
        found = cloud.ec2.describe_vpc_endpoints(VpcEndpointIds=[id])["VpcEndpoints"]
        return found[0] if found else None

    def read(self, cloud: Cloud, id: str, inputs: Values) -> Values | None:
        found = self._describe(cloud, id)
        if not found:
            return None
        return {
            "arn": cloud.arn("ec2", f"vpc-endpoint/{id}"),
            "state": found["State"],
            "prefixListId": "pl-68a54001",
            "ownerId": cloud.account,
            "routeTableIds": inputs.get("routeTableIds") or [],
            "policy": inputs.get("policy") or '{"Version":"2008-10-17","Statement":[]}',
        }

    def update(self, cloud: Cloud, id: str, old: Values, new: Values) -> None:
        before, after = set(old.get("routeTableIds") or []), set(new.get("routeTableIds") or [])
        arguments: dict[str, Any] = {}
        if after - before:
            arguments["AddRouteTableIds"] = sorted(after - before)
        if before - after:
            arguments["RemoveRouteTableIds"] = sorted(before - after)
        if new.get("policy") and new.get("policy") != old.get("policy"):
            arguments["PolicyDocument"] = new["policy"]
        if arguments:
            cloud.ec2.modify_vpc_endpoint(VpcEndpointId=id, **arguments)

    def delete(self, cloud: Cloud, id: str, state: Values) -> None:
        cloud.ec2.delete_vpc_endpoints(VpcEndpointIds=[id])
        wait(lambda: self._describe(cloud, id), lambda one: one is None, f"deletion of {id}")


@register
class FlowLog(_Tagged):
    token = "aws:ec2/flowLog:FlowLog"
    replace_on = (
        *("vpcId", "subnetId", "eniId", "trafficType", "logDestination", "logDestinationType", "iamRoleArn"),
        *("logFormat", "maxAggregationInterval", "destinationOptions"),
    )
    gone = ("InvalidFlowLogId.NotFound",)

    def create(self, cloud: Cloud, inputs: Values) -> str:
        arguments: dict[str, Any] = {
            "ResourceIds": [inputs.get("vpcId") or inputs.get("subnetId") or inputs["eniId"]],
            "ResourceType": "VPC"
            if inputs.get("vpcId")
            else "Subnet"
            if inputs.get("subnetId")
            else "NetworkInterface",
            "TrafficType": inputs.get("trafficType") or "ALL",
            "LogDestinationType": inputs.get("logDestinationType") or "cloud-watch-logs",
            "TagSpecifications": _specification("vpc-flow-log", inputs),
        }
        for ours, theirs in (
            ("logDestination", "LogDestination"),
            ("iamRoleArn", "DeliverLogsPermissionArn"),
            ("maxAggregationInterval", "MaxAggregationInterval"),
            ("logFormat", "LogFormat"),
        ):
            if inputs.get(ours) is not None:
                arguments[theirs] = inputs[ours]
        return cloud.ec2.create_flow_logs(**arguments)["FlowLogIds"][0]

    def read(self, cloud: Cloud, id: str, inputs: Values) -> Values | None:
        found = cloud.ec2.describe_flow_logs(FlowLogIds=[id])["FlowLogs"]
        return {"arn": cloud.arn("ec2", f"vpc-flow-log/{id}")} if found else None

    def delete(self, cloud: Cloud, id: str, state: Values) -> None:
        cloud.ec2.delete_flow_logs(FlowLogIds=[id])


@register
class SecurityGroup(_Tagged):
    token = "aws:ec2/securityGroup:SecurityGroup"
    replace_on = ("name", "namePrefix", "description", "vpcId")
    name_property = "name"
    defaults: ClassVar[Mapping[str, Any]] = {"description": "Managed by Pulumi", "revokeRulesOnDelete": False}
    gone = ("InvalidGroup.NotFound", "InvalidGroupId.NotFound")

    def create(self, cloud: Cloud, inputs: Values) -> str:
        answer = cloud.ec2.create_security_group(
            GroupName=inputs["name"],
            Description=inputs["description"],
            VpcId=inputs["vpcId"],
            TagSpecifications=_specification("security-group", inputs),
        )
        return answer["GroupId"]

    def finish(self, cloud: Cloud, id: str, inputs: Values) -> None:
        # As the real provider: the allow-all egress rule that AWS puts into a new group is taken out.
        everything = [{"IpProtocol": "-1", "IpRanges": [{"CidrIp": "0.0.0.0/0"}]}]
        found = self._describe(cloud, id)
        default = [
            one for one in found["IpPermissionsEgress"] if one["IpProtocol"] == "-1" and one["IpRanges"]
        ]
        if default and not inputs.get("egress"):
            cloud.ec2.revoke_security_group_egress(GroupId=id, IpPermissions=everything)
        self._rules(cloud, id, {}, inputs)

    def _rules(self, cloud: Cloud, id: str, old: Values, new: Values) -> None:
        for direction in ("ingress", "egress"):
            before, after = (side.get(direction) or [] for side in (old, new))
            for rule in [one for one in before if one not in after]:
                getattr(cloud.ec2, f"revoke_security_group_{direction}")(
                    GroupId=id, IpPermissions=[_inline(rule, id)]
                )
            for rule in [one for one in after if one not in before]:
                getattr(cloud.ec2, f"authorize_security_group_{direction}")(
                    GroupId=id, IpPermissions=[_inline(rule, id)]
                )

    def _describe(self, cloud: Cloud, id: str) -> Any:
        return cloud.ec2.describe_security_groups(GroupIds=[id])["SecurityGroups"][0]

    def read(self, cloud: Cloud, id: str, inputs: Values) -> Values:
        found = self._describe(cloud, id)
        return {
            "arn": cloud.arn("ec2", f"security-group/{id}"),
            "name": found["GroupName"],
            "description": found["Description"],
            "vpcId": found["VpcId"],
            "ownerId": cloud.account,
            "ingress": inputs.get("ingress") or [],
            "egress": inputs.get("egress") or [],
        }

    def update(self, cloud: Cloud, id: str, old: Values, new: Values) -> None:
        self._rules(cloud, id, old, new)

    def delete(self, cloud: Cloud, id: str, state: Values) -> None:
        cloud.ec2.delete_security_group(GroupId=id)


def _inline(rule: Values, own: str) -> dict[str, Any]:
    groups = [*(rule.get("securityGroups") or []), *([own] if rule.get("self") else [])]
    return _permission(
        rule, "protocol", rule.get("cidrBlocks") or [], groups, rule.get("prefixListIds") or []
    )


def _permission(
    rule: Values, protocol: str, blocks: list[str], groups: list[str], prefixes: list[str]
) -> dict[str, Any]:
    about = {"Description": rule["description"]} if rule.get("description") else {}
    permission: dict[str, Any] = {"IpProtocol": str(rule[protocol])}
    if rule.get("fromPort") is not None and str(rule[protocol]) != "-1":
        permission |= {"FromPort": int(rule["fromPort"]), "ToPort": int(rule["toPort"])}
    if blocks:
        permission["IpRanges"] = [{"CidrIp": one, **about} for one in blocks]
    if groups:
        permission["UserIdGroupPairs"] = [{"GroupId": one, **about} for one in groups]
    if prefixes:
        permission["PrefixListIds"] = [{"PrefixListId": one, **about} for one in prefixes]
    return permission


@register
class SecurityGroupRule(Resource):
    token = "aws:ec2/securityGroupRule:SecurityGroupRule"
    replace_on = (
        *("type", "fromPort", "toPort", "protocol", "securityGroupId", "cidrBlocks", "ipv6CidrBlocks"),
        *("sourceSecurityGroupId", "self", "prefixListIds"),
    )
    gone = ("InvalidGroup.NotFound", "InvalidPermission.NotFound")

    def create(self, cloud: Cloud, inputs: Values) -> str:
        answer = getattr(cloud.ec2, f"authorize_security_group_{inputs['type']}")(
            GroupId=inputs["securityGroupId"], IpPermissions=[self._permission(inputs)]
        )
        return answer["SecurityGroupRules"][0]["SecurityGroupRuleId"]

    def _permission(self, inputs: Values) -> dict[str, Any]:
        groups = [inputs["sourceSecurityGroupId"]] if inputs.get("sourceSecurityGroupId") else []
        groups += [inputs["securityGroupId"]] if inputs.get("self") else []
        return _permission(
            inputs, "protocol", inputs.get("cidrBlocks") or [], groups, inputs.get("prefixListIds") or []
        )

    def read(self, cloud: Cloud, id: str, inputs: Values) -> Values | None:
        return _rule_output(cloud, id, inputs)

    def update(self, cloud: Cloud, id: str, old: Values, new: Values) -> None:
        getattr(cloud.ec2, f"update_security_group_rule_descriptions_{new['type']}")(
            GroupId=new["securityGroupId"], IpPermissions=[self._permission(new)]
        )

    def delete(self, cloud: Cloud, id: str, state: Values) -> None:
        getattr(cloud.ec2, f"revoke_security_group_{state['type']}")(
            GroupId=state["securityGroupId"], IpPermissions=[self._permission(state)]
        )


def _rule_output(cloud: Cloud, id: str, inputs: Values) -> Values | None:
    mine = [{"Name": "group-id", "Values": [inputs["securityGroupId"]]}]
    rules = cloud.ec2.describe_security_group_rules(Filters=mine)["SecurityGroupRules"]
    return {"securityGroupRuleId": id} if any(one["SecurityGroupRuleId"] == id for one in rules) else None


class _Rule(_Tagged):
    direction: ClassVar[str]
    replace_on = ("securityGroupId",)
    gone = ("InvalidGroup.NotFound", "InvalidSecurityGroupRuleId.NotFound", "InvalidPermission.NotFound")

    def create(self, cloud: Cloud, inputs: Values) -> str:
        answer = getattr(cloud.ec2, f"authorize_security_group_{self.direction}")(
            GroupId=inputs["securityGroupId"],
            IpPermissions=[self._permission(inputs)],
            TagSpecifications=_specification("security-group-rule", inputs),
        )
        return answer["SecurityGroupRules"][0]["SecurityGroupRuleId"]

    def _permission(self, inputs: Values) -> dict[str, Any]:
        return _permission(
            inputs,
            "ipProtocol",
            [inputs["cidrIpv4"]] if inputs.get("cidrIpv4") else [],
            [inputs["referencedSecurityGroupId"]] if inputs.get("referencedSecurityGroupId") else [],
            [inputs["prefixListId"]] if inputs.get("prefixListId") else [],
        )

    def read(self, cloud: Cloud, id: str, inputs: Values) -> Values | None:
        found = _rule_output(cloud, id, inputs)
        return {**found, "arn": cloud.arn("ec2", f"security-group-rule/{id}")} if found else None

    def update(self, cloud: Cloud, id: str, old: Values, new: Values) -> None:
        rule = {
            "IpProtocol": str(new["ipProtocol"]),
            **(
                {"FromPort": int(new["fromPort"]), "ToPort": int(new["toPort"])}
                if new.get("fromPort")
                else {}
            ),
            **{
                theirs: new[ours]
                for ours, theirs in (
                    ("cidrIpv4", "CidrIpv4"),
                    ("referencedSecurityGroupId", "ReferencedGroupId"),
                    ("description", "Description"),
                )
                if new.get(ours)
            },
        }
        cloud.ec2.modify_security_group_rules(
            GroupId=new["securityGroupId"],
            SecurityGroupRules=[{"SecurityGroupRuleId": id, "SecurityGroupRule": rule}],
        )

    def delete(self, cloud: Cloud, id: str, state: Values) -> None:
        getattr(cloud.ec2, f"revoke_security_group_{self.direction}")(
            GroupId=state["securityGroupId"], SecurityGroupRuleIds=[id]
        )


@register
class SecurityGroupIngressRule(_Rule):
    token = "aws:vpc/securityGroupIngressRule:SecurityGroupIngressRule"
    direction = "ingress"


@register
class SecurityGroupEgressRule(_Rule):
    token = "aws:vpc/securityGroupEgressRule:SecurityGroupEgressRule"
    direction = "egress"


@register
class PlacementGroup(_Tagged):
    token = "aws:ec2/placementGroup:PlacementGroup"
    replace_on = ("name", "strategy", "partitionCount", "spreadLevel")
    name_property = "name"
    gone = ("InvalidPlacementGroup.Unknown",)

    def create(self, cloud: Cloud, inputs: Values) -> str:
        cloud.ec2.create_placement_group(
            GroupName=inputs["name"],
            Strategy=inputs["strategy"],
            TagSpecifications=_specification("placement-group", inputs),
        )
        return inputs["name"]

    def finish(self, cloud: Cloud, id: str, inputs: Values) -> None:
        wait(lambda: self._describe(cloud, id), lambda one: one["State"] == "available", id)

    def _describe(self, cloud: Cloud, id: str) -> Any:
        return cloud.ec2.describe_placement_groups(GroupNames=[id])["PlacementGroups"][0]

    def read(self, cloud: Cloud, id: str, inputs: Values) -> Values:
        found = self._describe(cloud, id)
        return {
            "arn": cloud.arn("ec2", f"placement-group/{id}"),
            "placementGroupId": found["GroupId"],
            "strategy": found["Strategy"],
        }

    def tag_target(self, id: str, state: Values) -> str:
        return state["placementGroupId"]

    def delete(self, cloud: Cloud, id: str, state: Values) -> None:
        cloud.ec2.delete_placement_group(GroupName=id)


@register
class LaunchTemplate(_Tagged):
    token = "aws:ec2/launchTemplate:LaunchTemplate"
    replace_on = ("name", "namePrefix")
    name_property = "name"
    name_limit = 125
    computed = ("latestVersion", "defaultVersion")
    gone = ("InvalidLaunchTemplateId.NotFound", "InvalidLaunchTemplateId.NotFoundException")

    def create(self, cloud: Cloud, inputs: Values) -> str:
        answer = cloud.ec2.create_launch_template(
            LaunchTemplateName=inputs["name"],
            LaunchTemplateData=_template_data(inputs),
            VersionDescription=inputs.get("description") or "",
            TagSpecifications=_specification("launch-template", inputs),
        )
        return answer["LaunchTemplate"]["LaunchTemplateId"]

    def read(self, cloud: Cloud, id: str, inputs: Values) -> Values:
        found = cloud.ec2.describe_launch_templates(LaunchTemplateIds=[id])["LaunchTemplates"][0]
        cloud.ec2.describe_launch_template_versions(
            LaunchTemplateId=id, Versions=[str(found["LatestVersionNumber"])]
        )
        return {
            "arn": cloud.arn("ec2", f"launch-template/{id}"),
            "latestVersion": found["LatestVersionNumber"],
            "defaultVersion": found["DefaultVersionNumber"],
        }

    def update(self, cloud: Cloud, id: str, old: Values, new: Values) -> None:
        # A change of anything but the tags of the template itself and the choice of its default is a new version.
        if _template_data(old) != _template_data(new):
            version = cloud.ec2.create_launch_template_version(
                LaunchTemplateId=id,
                LaunchTemplateData=_template_data(new),
                VersionDescription=new.get("description") or "",
            )["LaunchTemplateVersion"]["VersionNumber"]
            if new.get("updateDefaultVersion"):
                cloud.ec2.modify_launch_template(LaunchTemplateId=id, DefaultVersion=str(version))

    def delete(self, cloud: Cloud, id: str, state: Values) -> None:
        cloud.ec2.delete_launch_template(LaunchTemplateId=id)


_NOT_TEMPLATE_DATA = {
    *(
        "name",
        "namePrefix",
        "description",
        "tags",
        "tagsAll",
        "updateDefaultVersion",
        "defaultVersion",
        "region",
    ),
    *("__defaults", "capacityReservationSpecification", "instanceMarketOptions"),
}
_RENAMED = {"vpcSecurityGroupIds": "SecurityGroupIds", "securityGroupNames": "SecurityGroups"}


def _template_data(inputs: Values) -> dict[str, Any]:
    data: dict[str, Any] = {}
    for key, value in inputs.items():
        if key not in _NOT_TEMPLATE_DATA and value not in (None, "", [], {}):
            data[_RENAMED.get(key, key[0].upper() + key[1:])] = upper(value)
    for interface in data.get("NetworkInterfaces", []):
        if "SecurityGroups" in interface:
            interface["Groups"] = interface.pop("SecurityGroups")
        for flag in ("AssociatePublicIpAddress", "DeleteOnTermination"):
            if flag in interface:
                interface[flag] = _boolean(interface[flag])
    for mapping in data.get("BlockDeviceMappings", []):
        for flag in ("Encrypted", "DeleteOnTermination"):
            if flag in mapping.get("Ebs", {}):
                mapping["Ebs"][flag] = _boolean(mapping["Ebs"][flag])
    if "EbsOptimized" in data:
        data["EbsOptimized"] = _boolean(data["EbsOptimized"])
    for specification in data.get("TagSpecifications", []):
        specification["Tags"] = tag_list(specification.get("Tags", {}))
    reservation = inputs.get("capacityReservationSpecification")
    if reservation:
        target = reservation.get("capacityReservationTarget")
        data["CapacityReservationSpecification"] = {
            **(
                {"CapacityReservationPreference": p}
                if (p := reservation.get("capacityReservationPreference"))
                else {}
            ),
            **({"CapacityReservationTarget": upper(target)} if target else {}),
        }
    market = inputs.get("instanceMarketOptions")
    if market:
        data["InstanceMarketOptions"] = upper(market)
    return data


def _boolean(value: Any) -> bool:
    return value if isinstance(value, bool) else str(value).lower() == "true"
