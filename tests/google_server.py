"""The emulator of Google's store, with a header that only the real store sends."""

import contextlib

from gcp_storage_emulator.exceptions import NotFound  # pyright: ignore
from gcp_storage_emulator.handlers import objects  # pyright: ignore

_download = objects.download


def download(request, response, storage, *args, **kwargs):
    """Send the generation of an object, which TensorStore's databases need."""
    bucket, name = request.params["bucket_name"], request.params["object_id"]
    with contextlib.suppress(NotFound):
        generation = storage.get_file_obj(bucket, name)["generation"]
        response["x-goog-generation"] = generation
    return _download(request, response, storage, *args, **kwargs)


if __name__ == "__main__":
    objects.download = download
    # It looks up its handlers once, when it is imported.
    from gcp_storage_emulator.__main__ import main  # pyright: ignore

    main()
