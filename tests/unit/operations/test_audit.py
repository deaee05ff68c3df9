"""The audit finds what a destroy leaves, says what it costs and how to remove it, and nothing of anybody else."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
from typing import Any

import boto3
import pytest
from botocore.exceptions import ClientError

from operations.audit import AuditReport, AuditScope, audit, managed_ids
from tests.engine.emulator import REGION, Emulator, Identity, new_account

SCOPE = AuditScope(stack="dev", cluster="efa-dev", region=REGION)
OURS = {"project": "efa-finetune", "stack": "dev", "owner": "me"}
OTHER_STACK = {"project": "efa-finetune", "stack": "prod", "owner": "you"}
CLUSTER_TAG = {"kubernetes.io/cluster/efa-dev": "owned"}
POLICY = json.dumps(
    {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "s3:ListBucket", "Resource": "*"}]}
)


def tag_list(tags: dict[str, str]) -> list[dict[str, str]]:
    return [{"Key": key, "Value": value} for key, value in tags.items()]


def specification(kind: str, tags: dict[str, str]) -> list[dict[str, Any]]:
    return [{"ResourceType": kind, "Tags": tag_list(tags)}]


class Account:
    """An emulated account in which a test plants resources."""

    def __init__(self) -> None:
        self.identity = Identity(new_account())
        self.session: boto3.Session = EMULATOR.session(self.identity)

    def __getattr__(self, service: str) -> Any:
        client: Any = self.session.client(service)  # pyright: ignore[reportCallIssue, reportArgumentType]
        setattr(self, service, client)
        return client

    def audit(self, **options: Any) -> AuditReport:
        return audit(self.session, SCOPE, **options)

    def vpc(self, tags: dict[str, str], block: str = "10.0.0.0/16") -> str:
        made = self.ec2.create_vpc(CidrBlock=block, TagSpecifications=specification("vpc", tags))
        return made["Vpc"]["VpcId"]

    def subnet(self, vpc: str, block: str = "10.0.0.0/24") -> str:
        return self.ec2.create_subnet(VpcId=vpc, CidrBlock=block)["Subnet"]["SubnetId"]

    def volume(self, tags: dict[str, str]) -> str:
        made = self.ec2.create_volume(
            AvailabilityZone=f"{REGION}a",
            Size=100,
            VolumeType="gp3",
            TagSpecifications=specification("volume", tags),
        )
        return made["VolumeId"]

    def address(self, tags: dict[str, str]) -> str:
        made = self.ec2.allocate_address(Domain="vpc", TagSpecifications=specification("elastic-ip", tags))
        return made["AllocationId"]

    def nat_gateway(self, subnet: str, tags: dict[str, str]) -> str:
        made = self.ec2.create_nat_gateway(
            SubnetId=subnet,
            AllocationId=self.address(tags),
            TagSpecifications=specification("natgateway", tags),
        )
        return made["NatGateway"]["NatGatewayId"]

    def bucket(self, name: str, tags: dict[str, str] | None = None) -> None:
        self.s3.create_bucket(Bucket=name, CreateBucketConfiguration={"LocationConstraint": REGION})
        if tags:
            self.s3.put_bucket_tagging(Bucket=name, Tagging={"TagSet": tag_list(tags)})

    def role(self, name: str, tags: dict[str, str]) -> str:
        made = self.iam.create_role(RoleName=name, AssumeRolePolicyDocument="{}", Tags=tag_list(tags))
        return made["Role"]["Arn"]


EMULATOR = Emulator()


@pytest.fixture
def account() -> Account:
    return Account()


def by_kind(report: AuditReport) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for one in report.leftovers:
        found.setdefault(one.kind, []).append(one.id)
    return found


def only(report: AuditReport, kind: str) -> Any:
    found = [one for one in report.leftovers if one.kind == kind]
    assert len(found) == 1, f"{kind}: {[one.id for one in report.leftovers]}"
    return found[0]


def test_an_empty_account_is_clean(account: Account) -> None:
    report = account.audit()

    assert report.leftovers == ()
    assert report.unreadable == ()
    assert report.clean
    assert report.render() == f"Nothing of stack dev (cluster efa-dev) in {REGION} is left."


def test_volume_says_cost_and_command(account: Account) -> None:
    volume = account.volume(OURS)

    found = only(account.audit(), "EBS volume")

    assert found.id == volume
    assert found.cost == "8.00 USD a month (100 GiB gp3)"
    assert found.hourly_usd == pytest.approx(8.0 / 730)
    assert found.command == f"aws ec2 delete-volume --volume-id {volume} --region {REGION}"
    assert found.found_by == "tags project=efa-finetune, stack=dev"


def test_volume_of_a_persistent_volume_claim_is_found_by_the_cluster_tag(account: Account) -> None:
    volume = account.volume({**CLUSTER_TAG, "kubernetes.io/created-for/pvc/name": "data"})

    assert by_kind(account.audit()) == {"EBS volume": [volume]}


def test_network_leftovers(account: Account) -> None:
    vpc = account.vpc(OURS)
    subnet = account.subnet(vpc)
    nat = account.nat_gateway(subnet, OURS)
    # What the VPC CNI leaves behind carries no tag of ours: it is known by where it is.
    interface = account.ec2.create_network_interface(SubnetId=subnet, Description="aws-K8S-i-0123")
    interface_id = interface["NetworkInterface"]["NetworkInterfaceId"]
    group = account.ec2.create_security_group(GroupName="k8s-elb-a1", Description="elb", VpcId=vpc)["GroupId"]

    report = account.audit()

    found = by_kind(report)
    assert found["NAT gateway"] == [nat]
    assert len(found["elastic IP address"]) == 1
    assert found["network interface"] == [interface_id]
    assert found["security group"] == [group]
    assert found["subnet"] == [subnet]
    assert found["VPC"] == [vpc]
    assert only(report, "NAT gateway").hourly_usd == pytest.approx(0.045)
    assert only(report, "network interface").cost.startswith("nothing, but it keeps its subnet")
    # The dearest first.
    assert report.leftovers[0].kind == "NAT gateway"


def test_load_balancer_that_a_controller_made(account: Account) -> None:
    vpc = account.vpc(OURS)
    subnets = [account.subnet(vpc, f"10.0.{n}.0/24") for n in range(2)]
    made = account.elbv2.create_load_balancer(
        Name="k8s-ray", Subnets=subnets, Type="network", Tags=tag_list({"elbv2.k8s.aws/cluster": "efa-dev"})
    )
    arn = made["LoadBalancers"][0]["LoadBalancerArn"]

    found = only(account.audit(), "load balancer")

    assert found.id == arn
    assert found.hourly_usd == pytest.approx(0.0225)
    assert arn in found.command


def test_log_group_that_eks_wrote_again_after_the_destroy(account: Account) -> None:
    account.logs.create_log_group(logGroupName="/aws/eks/efa-dev/cluster")
    account.logs.create_log_group(logGroupName="/aws/eks/efa-dev2/cluster")
    account.logs.create_log_group(logGroupName="/aws/eks/efa-dev/cluster-copy")

    found = only(account.audit(), "log group")

    assert found.id == "/aws/eks/efa-dev/cluster"
    assert found.found_by == "name /aws/eks/efa-dev/cluster"


def test_schedule_is_known_by_its_name(account: Account) -> None:
    role = account.role("scheduler", {})
    for name in ("efa-dev-expiry-0123abc", "efa-dev-expiry-mine", "efa-devel-expiry-0123abc"):
        account.scheduler.create_schedule(
            Name=name,
            ScheduleExpression="at(2099-01-01T00:00:00)",
            FlexibleTimeWindow={"Mode": "OFF"},
            Target={"Arn": "arn:aws:scheduler:::aws-sdk:eks:updateNodegroupConfig", "RoleArn": role},
        )

    found = only(account.audit(), "schedule")

    assert found.id == "efa-dev-expiry-0123abc"
    assert found.command == (
        f"aws scheduler delete-schedule --name efa-dev-expiry-0123abc --group-name default --region {REGION}"
    )


def test_bucket_counts_old_versions_and_delete_markers(account: Account) -> None:
    name = f"efa-dev-runs-{account.identity.account[-7:]}"  # pyright: ignore[reportOptionalSubscript]
    account.bucket(name, OURS)
    account.s3.put_bucket_versioning(Bucket=name, VersioningConfiguration={"Status": "Enabled"})
    for _ in range(3):
        account.s3.put_object(Bucket=name, Key="runs/a/checkpoint", Body=b"x" * 1024)
    account.s3.delete_object(Bucket=name, Key="runs/a/checkpoint")

    found = only(account.audit(), "S3 bucket")

    assert "4 object version(s), 4 of them old or deleted" in found.cost
    assert "delete-objects" in found.command
    assert found.command.endswith(f"then aws s3api delete-bucket --bucket {name} --region {REGION}")


def test_instances_that_still_run(account: Account) -> None:
    subnet = account.subnet(account.vpc(OURS))
    started = account.ec2.run_instances(
        ImageId="ami-1", InstanceType="g6.12xlarge", MinCount=1, MaxCount=1, SubnetId=subnet,
        TagSpecifications=specification("instance", {"eks:cluster-name": "efa-dev"}),
    )  # fmt: skip
    id = started["Instances"][0]["InstanceId"]

    found = only(account.audit(), "instance g6.12xlarge")

    assert found.id == id
    assert found.hourly_usd == pytest.approx(4.6016)
    account.ec2.terminate_instances(InstanceIds=[id])
    assert "instance g6.12xlarge" not in by_kind(account.audit())


def test_cluster_and_its_node_groups(account: Account) -> None:
    vpc = account.vpc(OURS)
    subnets = [
        account.ec2.create_subnet(VpcId=vpc, CidrBlock=f"10.0.{n}.0/24", AvailabilityZone=f"{REGION}{zone}")[
            "Subnet"
        ]["SubnetId"]
        for n, zone in enumerate("ab")
    ]
    role = account.role("efa-dev-node-0123abc", OURS)
    account.eks.create_cluster(
        name="efa-dev", roleArn=role, resourcesVpcConfig={"subnetIds": subnets}, tags=OURS
    )
    account.eks.create_nodegroup(
        clusterName="efa-dev",
        nodegroupName="efa-dev-gpu-0123abc",
        subnets=subnets[:1],
        nodeRole=role,
        scalingConfig={"minSize": 0, "maxSize": 1, "desiredSize": 1},
        instanceTypes=["g6.12xlarge"],
    )

    report = account.audit()

    found = by_kind(report)
    assert found["EKS cluster"] == ["efa-dev"]
    assert found["EKS node group"] == ["efa-dev:efa-dev-gpu-0123abc"]
    assert found["instance g6.12xlarge"]
    assert only(report, "EKS cluster").hourly_usd == pytest.approx(0.10)
    assert only(report, "IAM role").command == "aws iam delete-role --role-name efa-dev-node-0123abc"
    assert report.hourly_usd > 4.7


def test_file_system(account: Account) -> None:
    subnet = account.subnet(account.vpc(OURS))
    account.fsx.create_file_system(
        FileSystemType="LUSTRE", StorageCapacity=1200, SubnetIds=[subnet], Tags=tag_list(OURS)
    )

    found = only(account.audit(), "FSx for Lustre")

    assert found.cost == "174.00 USD a month (1200 GiB)"


def test_nothing_of_another_stack_or_of_anybody_else(account: Account) -> None:
    """Names that begin alike, tags that half fit, and what has the right name but says whose it is."""
    for tags in (
        OTHER_STACK,
        {"project": "other", "stack": "dev"},
        {"stack": "dev"},
        {"Name": "efa-dev-gpu"},
        {},
    ):
        account.volume(tags)
        account.address(tags)
    account.volume({"kubernetes.io/cluster/efa-dev": "shared"})
    account.volume({"kubernetes.io/cluster/efa-dev2": "owned"})
    account.volume({**CLUSTER_TAG, "stack": "prod"})
    subnet = account.subnet(account.vpc(OTHER_STACK))
    account.nat_gateway(subnet, OTHER_STACK)
    account.bucket(f"efa-dev-runs-backup-{account.identity.account}")
    account.bucket(f"efa-dev-runs-{account.identity.account[-6:]}f", OTHER_STACK)  # pyright: ignore[reportOptionalSubscript]
    account.role("efa-dev-node-0123abc", OTHER_STACK)
    account.role("efa-dev-admin", {})
    account.role("my-efa-dev-node-0123abc", {})
    account.logs.create_log_group(logGroupName="efa-dev-flow-logs-0123abc", tags=OTHER_STACK)

    assert account.audit().leftovers == ()


def test_two_accounts_do_not_meet(account: Account) -> None:
    Account().volume(OURS)

    assert account.audit().leftovers == ()


def test_what_pulumi_still_manages_is_left_out(account: Account) -> None:
    kept, lost = account.volume(OURS), account.volume(OURS)
    state = {"deployment": {"resources": [{"urn": "u", "id": kept, "outputs": {"arn": "a"}}]}}

    report = account.audit(managed=managed_ids(state))

    assert by_kind(report) == {"EBS volume": [lost]}


def test_the_commands_remove_what_they_name(account: Account) -> None:
    """Each command is run as it stands, by a stand-in for the aws program, until nothing is left."""
    vpc = account.vpc(OURS)
    subnet = account.subnet(vpc)
    account.nat_gateway(subnet, OURS)
    account.volume(OURS)
    account.ec2.create_network_interface(SubnetId=subnet, Description="aws-K8S-i-0123")
    account.logs.create_log_group(logGroupName="/aws/eks/efa-dev/cluster")
    account.role("efa-dev-job-0123abc", OURS)
    account.iam.put_role_policy(RoleName="efa-dev-job-0123abc", PolicyName="p", PolicyDocument=POLICY)

    for _ in range(4):  # one finding may stand in the way of another
        for one in account.audit().leftovers:
            with contextlib.suppress(ClientError):
                _run(account, one.command)

    assert account.audit().clean


def _run(account: Account, command: str) -> None:
    for one in command.split(" && "):
        words = shlex.split(one)
        assert words[0] == "aws"
        client = getattr(account, words[1])
        method = words[2].replace("-", "_")
        operation = client.meta.method_to_api_mapping[method]
        members = client.meta.service_model.operation_model(operation).input_shape.members
        given: dict[str, Any] = {}
        for flag, value in zip(words[3::2], words[4::2], strict=True):
            if flag == "--region":
                continue
            wanted = flag.removeprefix("--").replace("-", "").lower()
            name = next(
                member for member in members if re.sub(r"\W", "", member).lower() in (wanted, f"{wanted}s")
            )
            given[name] = [value] if members[name].type_name == "list" else value
        getattr(client, method)(**given)


def test_what_cannot_be_read_is_said(account: Account, monkeypatch: pytest.MonkeyPatch) -> None:
    def deny(model: Any, **_: Any) -> None:
        if model.name == "DescribeVolumes":
            error = {"Code": "UnauthorizedOperation", "Message": "no"}
            raise ClientError({"Error": error}, model.name)  # pyright: ignore[reportArgumentType]

    account.session = EMULATOR.session(account.identity, before_call=deny)

    report = account.audit()

    assert report.unreadable == ("EBS volumes: UnauthorizedOperation (DescribeVolumes)",)
    assert not report.clean
    assert "Not looked at" in report.render()


def test_credentials_that_are_not_accepted_are_an_error(account: Account) -> None:
    def refuse(model: Any, **_: Any) -> None:
        raise ClientError({"Error": {"Code": "ExpiredToken", "Message": "expired"}}, model.name)

    with pytest.raises(ClientError, match="ExpiredToken"):
        audit(EMULATOR.session(account.identity, before_call=refuse), SCOPE)


def test_report_as_json_and_for_people(account: Account) -> None:
    volume = account.volume({**OURS, "Name": "scratch"})

    report = account.audit()

    printed = json.loads(json.dumps(report.to_dict()))
    assert printed["leftovers"][0]["id"] == volume
    assert set(printed["leftovers"][0]) == {"kind", "id", "name", "found_by", "hourly_usd", "cost", "command"}
    text = report.render()
    assert text.startswith("1 resource(s) of stack dev (cluster efa-dev)")
    assert f"EBS volume {volume} (scratch)" in text
    assert "  remove: aws ec2 delete-volume" in text
