"""Object stores, such as `s3://`, as TensorStore names them."""

import os
from typing import Any

#: The folder of the arrays, each a Zarr array, in that of a checkpoint.
ARRAYS = "arrays"
#: Half a minute in all; by default, it would be a quarter of an hour.
_RETRIES = {"max_retries": 6, "initial_delay": "1s", "max_delay": "8s"}


def kvstore(folder: Any) -> dict[str, Any]:
    """How TensorStore names a folder of an object store."""
    scheme, _, rest = os.fspath(folder).partition("://")
    bucket, _, path = rest.partition("/")
    where: dict[str, Any] = {"bucket": bucket, "path": f"{path.strip('/')}/"}
    if scheme != "s3":
        return {"driver": "gcs", **where}
    said = os.environ
    endpoint = said.get("AWS_ENDPOINT_URL_S3") or said.get("AWS_ENDPOINT_URL")
    region = said.get("AWS_REGION") or said.get("AWS_DEFAULT_REGION")
    where |= {"endpoint": endpoint} if endpoint else {}
    where |= {"aws_region": region} if region else {}
    if "AWS_ACCESS_KEY_ID" in os.environ:
        where["aws_credentials"] = {"type": "environment"}
    return {"driver": "s3", **where}


def context() -> Any:
    """The settings of TensorStore for object stores."""
    import tensorstore as ts

    return ts.Context({"s3_request_retries": _RETRIES, "gcs_request_retries": _RETRIES})
