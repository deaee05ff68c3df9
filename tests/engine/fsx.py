"""FSx for Lustre, which ministack lacks: file systems with an interface in their subnet, and data repositories."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable
from typing import Any

from ministack.core.responses import get_account_id, get_region, set_request_account_id, set_request_region
from ministack.core.router import extract_access_key_id, extract_region
from ministack.services import ec2

TARGET = "AWSSimbaAPIService_v20180301."

Key = tuple[str, str, str]
file_systems: dict[Key, dict[str, Any]] = {}
associations: dict[Key, dict[str, Any]] = {}


class _RefusedError(Exception):
    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def around(app: Callable[..., Any]) -> Callable[..., Any]:
    """ministack's application, with FSx in front of it."""

    async def wrapped(scope: dict[str, Any], receive: Any, send: Any) -> None:
        headers = {name.decode().lower(): value.decode() for name, value in scope.get("headers", [])}
        if not headers.get("x-amz-target", "").startswith(TARGET):
            await app(scope, receive, send)
            return
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        set_request_account_id(extract_access_key_id(headers, {}))
        set_request_region(extract_region(headers, {}))
        operation = headers["x-amz-target"].removeprefix(TARGET)
        try:
            status, answer = 200, _OPERATIONS[operation](json.loads(body or b"{}"))
        except _RefusedError as error:
            status, answer = 400, {"__type": error.code, "Message": str(error), "message": str(error)}
        content = [(b"content-type", b"application/x-amz-json-1.1")]
        await send({"type": "http.response.start", "status": status, "headers": content})
        await send({"type": "http.response.body", "body": json.dumps(answer).encode()})

    return wrapped


def _key(id: str) -> Key:
    return (get_account_id(), get_region(), id)


def _mine(store: dict[Key, dict[str, Any]]) -> list[dict[str, Any]]:
    return [value for key, value in store.items() if key[:2] == _key("")[:2]]


def _arn(id: str) -> str:
    return f"arn:aws:fsx:{get_region()}:{get_account_id()}:{id}"


def _create_file_system(body: dict[str, Any]) -> dict[str, Any]:
    subnet = body["SubnetIds"][0]
    if subnet not in ec2._subnets:
        raise _RefusedError("InvalidNetworkSettings", f"The subnet ID '{subnet}' does not exist")
    id, interface = f"fs-{uuid.uuid4().hex[:17]}", f"eni-{uuid.uuid4().hex[:17]}"
    ec2._network_interfaces[interface] = {
        "NetworkInterfaceId": interface,
        "SubnetId": subnet,
        "VpcId": ec2._subnets[subnet]["VpcId"],
        "AvailabilityZone": ec2._subnets[subnet]["AvailabilityZone"],
        "Description": f"Created by Amazon FSx for file system {id}",
        "OwnerId": get_account_id(),
        "Status": "in-use",
        "PrivateIpAddress": "10.0.0.30",
        "InterfaceType": "interface",
        "SourceDestCheck": True,
        "MacAddress": "02:00:00:00:00:01",
        "Groups": [{"GroupId": group, "GroupName": group} for group in body.get("SecurityGroupIds", [])],
        "Attachment": None,
    }
    file_systems[_key(id)] = {
        "FileSystemId": id,
        "FileSystemType": "LUSTRE",
        "Lifecycle": "AVAILABLE",
        "CreationTime": time.time(),
        "OwnerId": get_account_id(),
        "StorageCapacity": body["StorageCapacity"],
        "VpcId": ec2._subnets[subnet]["VpcId"],
        "SubnetIds": [subnet],
        "NetworkInterfaceIds": [interface],
        "DNSName": f"{id}.fsx.{get_region()}.amazonaws.com",
        "ResourceARN": _arn(f"file-system/{id}"),
        "Tags": body.get("Tags", []),
        "LustreConfiguration": {**body.get("LustreConfiguration", {}), "MountName": "fsx"},
    }
    return {"FileSystem": file_systems[_key(id)]}


def _file_system(id: str) -> dict[str, Any]:
    found = file_systems.get(_key(id))
    if found is None:
        raise _RefusedError("FileSystemNotFound", f"File system '{id}' does not exist.")
    return found


def _describe_file_systems(body: dict[str, Any]) -> dict[str, Any]:
    wanted = body.get("FileSystemIds")
    return {"FileSystems": [_file_system(id) for id in wanted] if wanted else _mine(file_systems)}


def _update_file_system(body: dict[str, Any]) -> dict[str, Any]:
    found = _file_system(body["FileSystemId"])
    found["StorageCapacity"] = body.get("StorageCapacity", found["StorageCapacity"])
    return {"FileSystem": found}


def _delete_file_system(body: dict[str, Any]) -> dict[str, Any]:
    id = body["FileSystemId"]
    for interface in _file_system(id)["NetworkInterfaceIds"]:
        ec2._network_interfaces.pop(interface, None)
    del file_systems[_key(id)]
    for key in [key for key, one in associations.items() if one["FileSystemId"] == id]:
        del associations[key]
    return {"FileSystemId": id, "Lifecycle": "DELETING"}


def _create_association(body: dict[str, Any]) -> dict[str, Any]:
    _file_system(body["FileSystemId"])
    id = f"dra-{uuid.uuid4().hex[:17]}"
    associations[_key(id)] = {
        "AssociationId": id,
        "ResourceARN": _arn(f"association/{body['FileSystemId']}/{id}"),
        "FileSystemId": body["FileSystemId"],
        "FileSystemPath": body["FileSystemPath"],
        "DataRepositoryPath": body["DataRepositoryPath"],
        "Lifecycle": "AVAILABLE",
        "Tags": body.get("Tags", []),
        "S3": body.get("S3", {}),
        "CreationTime": time.time(),
    }
    return {"Association": associations[_key(id)]}


def _association(id: str) -> dict[str, Any]:
    found = associations.get(_key(id))
    if found is None:
        raise _RefusedError("DataRepositoryAssociationNotFound", f"Association '{id}' does not exist.")
    return found


def _describe_associations(body: dict[str, Any]) -> dict[str, Any]:
    wanted = body.get("AssociationIds")
    return {"Associations": [_association(id) for id in wanted] if wanted else _mine(associations)}


def _delete_association(body: dict[str, Any]) -> dict[str, Any]:
    _association(body["AssociationId"])
    del associations[_key(body["AssociationId"])]
    return {"AssociationId": body["AssociationId"], "Lifecycle": "DELETING"}


def _tagged(arn: str) -> dict[str, Any]:
    for one in (*_mine(file_systems), *_mine(associations)):
        if one["ResourceARN"] == arn:
            return one
    raise _RefusedError("ResourceNotFound", f"The resource '{arn}' does not exist.")


def _tag_resource(body: dict[str, Any]) -> dict[str, Any]:
    found = _tagged(body["ResourceARN"])
    added = {one["Key"]: one for one in body["Tags"]}
    found["Tags"] = [*(one for one in found["Tags"] if one["Key"] not in added), *added.values()]
    return {}


def _untag_resource(body: dict[str, Any]) -> dict[str, Any]:
    found = _tagged(body["ResourceARN"])
    found["Tags"] = [one for one in found["Tags"] if one["Key"] not in body["TagKeys"]]
    return {}


_OPERATIONS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "CreateFileSystem": _create_file_system,
    "DescribeFileSystems": _describe_file_systems,
    "UpdateFileSystem": _update_file_system,
    "DeleteFileSystem": _delete_file_system,
    "CreateDataRepositoryAssociation": _create_association,
    "DescribeDataRepositoryAssociations": _describe_associations,
    "DeleteDataRepositoryAssociation": _delete_association,
    "TagResource": _tag_resource,
    "UntagResource": _untag_resource,
}
