"""A bucket's objects as files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import boto3

from tests.conftest import Bucket


def client(bucket: Bucket) -> Any:
    environment = bucket.environment
    return boto3.client(
        "s3",
        endpoint_url=environment["AWS_ENDPOINT_URL"],
        aws_access_key_id=environment["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=environment["AWS_SECRET_ACCESS_KEY"],
        region_name="us-east-1",
    )


def download(bucket: Bucket, target: Path) -> None:
    """A copy of what lies below run/, as `aws s3 cp --recursive` makes it."""
    s3 = client(bucket)
    for page in s3.get_paginator("list_objects_v2").paginate(Bucket=bucket.name, Prefix="run/"):
        for found in page.get("Contents", []):
            path = target / found["Key"].removeprefix("run/")
            path.parent.mkdir(parents=True, exist_ok=True)
            s3.download_file(bucket.name, found["Key"], str(path))
    s3.close()
