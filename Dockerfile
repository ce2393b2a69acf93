# A server in a container; docs/deploy.md describes its options. It needs a file of keys, which user 10001 can read.
#
#     docker build -t hotcold .
#     docker run -p 127.0.0.1:8080:8080 -v hotcold-models:/models -v /etc/hotcold/keys:/run/secrets/keys:ro hotcold

# Debian's packages are not pinned, because their security fixes are wanted. `python tools/lock.py` renews the
# versions of Python's packages, all of which requirements.lock states with their hashes.
FROM python:3.12-slim-bookworm AS build
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /build
COPY requirements.lock ./
RUN pip wheel --no-cache-dir --require-hashes --wheel-dir /wheels -r requirements.lock \
    && pip install --no-cache-dir --no-index --find-links /wheels --require-hashes -r requirements.lock
COPY pyproject.toml CMakeLists.txt README.md LICENSE ./
COPY csrc csrc
COPY src src
COPY third_party third_party
# Every instruction set is compiled, and chosen when it runs.
RUN HOTCOLD_ISAS=all pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheels .

FROM python:3.12-slim-bookworm
# libvulkan1 finds a GPU's driver where the container is given one.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends libvulkan1 \
    && rm -rf /var/lib/apt/lists/*
# What Hotcold's own downloads do not use, and NumPy's tests, are 18 MB.
# hadolint ignore=DL3013
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    pip install --no-cache-dir --no-index --find-links /wheels hotcold \
    && pip uninstall --yes hf-xet \
    && find "$(python -c 'import numpy; print(numpy.__path__[0])')" -type d -name tests -prune -exec rm -r {} +
RUN useradd --uid 10001 --home-dir /models --create-home --shell /usr/sbin/nologin hotcold
USER 10001
# Downloaded models (-m hf:...) are kept here: give it a volume.
ENV HOTCOLD_CACHE=/models PYTHONDONTWRITEBYTECODE=1
VOLUME /models
WORKDIR /models
EXPOSE 8080
# /health needs no key. It says 503 while the model loads, which may take minutes and a download first.
HEALTHCHECK --interval=10s --timeout=5s --start-period=30m --retries=3 \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8080/health', timeout=4)"]
# SIGTERM, which `docker stop` sends, lets running requests finish: give it more time than --drain.
STOPSIGNAL SIGTERM
ENTRYPOINT ["hotcold"]
CMD ["serve", "--host", "0.0.0.0", "--port", "8080", "--api-key-file", "/run/secrets/keys"]
