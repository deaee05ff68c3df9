"""The VPC: two kinds of subnet in each zone, a way out through NAT, and S3 without it."""

from __future__ import annotations

import pulumi
import pulumi_aws as aws

from infra.iam import document, trust
from infra.settings import StackSettings, private_subnets, public_subnets


class Network(pulumi.ComponentResource):
    """VPC with one public and one private subnet per zone. All nodes live in the private ones.

    There is one NAT gateway, in the GPU zone (``nat_per_zone``: one per zone), and a gateway endpoint keeps
    S3 traffic off it.
    """

    vpc_id: pulumi.Output[str]
    private_subnet_ids: dict[str, pulumi.Output[str]]

    def __init__(
        self, name: str, settings: StackSettings, opts: pulumi.ResourceOptions | None = None
    ) -> None:
        super().__init__("efa:infra:Network", name, None, opts)
        self._name = name
        self._settings = settings
        self._child = pulumi.ResourceOptions(parent=self)

        self.vpc = aws.ec2.Vpc(
            f"{name}-vpc",
            cidr_block=settings.vpc_cidr,
            enable_dns_support=True,
            enable_dns_hostnames=True,
            tags={"Name": name},
            opts=self._child,
        )
        self.vpc_id = self.vpc.id
        public = self._create_public_subnets()
        gateways = self._create_nat_gateways(public)
        private, route_tables = self._create_private_subnets(gateways)
        self._create_s3_endpoint(route_tables)
        if settings.flow_logs:
            self._create_flow_logs()

        self.private_subnet_ids = {zone: subnet.id for zone, subnet in private.items()}
        self.register_outputs({"vpcId": self.vpc_id})

    def _create_public_subnets(self) -> dict[str, aws.ec2.Subnet]:
        self.internet_gateway = aws.ec2.InternetGateway(
            f"{self._name}-igw", vpc_id=self.vpc.id, tags={"Name": self._name}, opts=self._child
        )
        route_table = aws.ec2.RouteTable(
            f"{self._name}-public",
            vpc_id=self.vpc.id,
            routes=[aws.ec2.RouteTableRouteArgs(cidr_block="0.0.0.0/0", gateway_id=self.internet_gateway.id)],
            tags={"Name": f"{self._name}-public"},
            opts=self._child,
        )
        subnets: dict[str, aws.ec2.Subnet] = {}
        for zone, network in zip(self._settings.zones, public_subnets(self._settings), strict=True):
            subnets[zone] = self._create_subnet("public", zone, str(network), route_table)
        return subnets

    def _create_nat_gateways(self, public: dict[str, aws.ec2.Subnet]) -> dict[str, aws.ec2.NatGateway]:
        """NAT gateway by zone; the zones without one use that of the GPU zone."""
        zones = self._settings.zones if self._settings.nat_per_zone else (self._settings.gpu_zone,)
        gateways: dict[str, aws.ec2.NatGateway] = {}
        for zone in zones:
            address = aws.ec2.Eip(
                f"{self._name}-nat-{zone}",
                domain="vpc",
                tags={"Name": f"{self._name}-nat-{zone}"},
                # AWS refuses a public address in a VPC that has no internet gateway (any more).
                opts=pulumi.ResourceOptions(parent=self, depends_on=[self.internet_gateway]),
            )
            gateways[zone] = aws.ec2.NatGateway(
                f"{self._name}-nat-{zone}",
                allocation_id=address.id,
                subnet_id=public[zone].id,
                tags={"Name": f"{self._name}-{zone}"},
                opts=pulumi.ResourceOptions(parent=self, depends_on=[self.internet_gateway]),
            )
        return gateways

    def _create_private_subnets(
        self, gateways: dict[str, aws.ec2.NatGateway]
    ) -> tuple[dict[str, aws.ec2.Subnet], list[aws.ec2.RouteTable]]:
        subnets: dict[str, aws.ec2.Subnet] = {}
        route_tables: list[aws.ec2.RouteTable] = []
        for zone, network in zip(self._settings.zones, private_subnets(self._settings), strict=True):
            gateway = gateways.get(zone, gateways[self._settings.gpu_zone])
            route_table = aws.ec2.RouteTable(
                f"{self._name}-private-{zone}",
                vpc_id=self.vpc.id,
                routes=[aws.ec2.RouteTableRouteArgs(cidr_block="0.0.0.0/0", nat_gateway_id=gateway.id)],
                tags={"Name": f"{self._name}-private-{zone}"},
                opts=self._child,
            )
            route_tables.append(route_table)
            subnets[zone] = self._create_subnet("private", zone, str(network), route_table)
        return subnets, route_tables

    def _create_subnet(
        self, kind: str, zone: str, cidr: str, route_table: aws.ec2.RouteTable
    ) -> aws.ec2.Subnet:
        subnet = aws.ec2.Subnet(
            f"{self._name}-{kind}-{zone}",
            vpc_id=self.vpc.id,
            availability_zone=zone,
            cidr_block=cidr,
            map_public_ip_on_launch=False,
            tags={"Name": f"{self._name}-{kind}-{zone}"},
            opts=self._child,
        )
        aws.ec2.RouteTableAssociation(
            f"{self._name}-{kind}-{zone}",
            subnet_id=subnet.id,
            route_table_id=route_table.id,
            opts=self._child,
        )
        return subnet

    def _create_s3_endpoint(self, route_tables: list[aws.ec2.RouteTable]) -> None:
        aws.ec2.VpcEndpoint(
            f"{self._name}-s3",
            vpc_id=self.vpc.id,
            service_name=f"com.amazonaws.{self._settings.region}.s3",
            vpc_endpoint_type="Gateway",
            route_table_ids=[table.id for table in route_tables],
            tags={"Name": f"{self._name}-s3"},
            opts=self._child,
        )

    def _create_flow_logs(self) -> None:
        group = aws.cloudwatch.LogGroup(
            f"{self._name}-flow-logs", retention_in_days=self._settings.log_retention_days, opts=self._child
        )
        role = aws.iam.Role(
            f"{self._name}-flow-logs",
            assume_role_policy=trust("vpc-flow-logs.amazonaws.com"),
            opts=self._child,
        )
        policy = aws.iam.RolePolicy(
            f"{self._name}-flow-logs",
            role=role.name,
            policy=group.arn.apply(
                lambda arn: document(
                    [
                        {
                            "Effect": "Allow",
                            "Action": [
                                "logs:CreateLogStream",
                                "logs:PutLogEvents",
                                "logs:DescribeLogStreams",
                            ],
                            "Resource": [arn, f"{arn}:*"],
                        }
                    ]
                )
            ),
            opts=self._child,
        )
        aws.ec2.FlowLog(
            f"{self._name}-flow-logs",
            vpc_id=self.vpc.id,
            traffic_type="ALL",
            log_destination_type="cloud-watch-logs",
            log_destination=group.arn,
            iam_role_arn=role.arn,
            opts=pulumi.ResourceOptions(parent=self, depends_on=[policy]),
        )
