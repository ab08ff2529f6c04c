"""Calls the API over gRPC with what its interface says and nothing generated from it.

Usage: call.py DESCRIPTORS CALLS, with ADDRESS set. DESCRIPTORS is a file with an encoded FileDescriptorSet, CALLS a JSON
array of objects: "method" with its service, "request", and "metadata", an array of pairs. Prints for each, in a line, what
was answered: code, message or details, and metadata.
"""

import json
import os
import sys

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory
from google.rpc import error_details_pb2, status_pb2

DETAILS = [error_details_pb2.ErrorInfo, error_details_pb2.RetryInfo, error_details_pb2.BadRequest]


def load(path):
    """Makes a pool of the files of a descriptor set."""
    with open(path, "rb") as file:
        files = descriptor_pb2.FileDescriptorSet.FromString(file.read()).file
    pool = descriptor_pool.DescriptorPool()
    for file in files:
        pool.Add(file)
    return pool


def plain(message):
    return json_format.MessageToDict(message, preserving_proto_field_name=True)


def details(metadata):
    """Reads what a status says beside its code and words, by type."""
    status = status_pb2.Status.FromString(metadata.get("grpc-status-details-bin", b""))
    read = {}
    for packed in status.details:
        for kind in DETAILS:
            detail = kind()
            if packed.Unpack(detail):
                read[kind.__name__] = plain(detail)
    return read


def call(channel, pool, asked):
    service, name = asked["method"].split("/")
    method = pool.FindServiceByName(service).methods_by_name[name]
    request, response = (
        message_factory.GetMessageClass(kind) for kind in (method.input_type, method.output_type)
    )
    stub = channel.unary_unary(
        "/" + asked["method"], request_serializer=request.SerializeToString, response_deserializer=response.FromString
    )
    metadata = [tuple(pair) for pair in asked["metadata"]]
    message = json_format.ParseDict(asked["request"], request())
    try:
        answer, told = stub.with_call(message, metadata=metadata, timeout=30)
        said = {"code": "OK", "message": plain(answer)}
    except grpc.RpcError as error:
        told = error
        said = {"code": error.code().name, "words": error.details()}
    metadata = dict((*(told.initial_metadata() or ()), *(told.trailing_metadata() or ())))
    said["details"] = details(metadata)
    said["metadata"] = {name: value for name, value in metadata.items() if not name.endswith("-bin")}
    return said


pool = load(sys.argv[1])
with grpc.insecure_channel(os.environ["ADDRESS"]) as channel:
    for asked in json.loads(sys.argv[2]):
        print(json.dumps(call(channel, pool, asked)), flush=True)
