# The image of sansgpu 0.2.0, for amd64 and arm64. Build it in a checkout of that version:
# docker build -t sansgpu:0.2.0 .

FROM python:3.12.12-slim-bookworm AS wheel
# hadolint ignore=DL3008 # Debian removes a version when it publishes the next one.
RUN apt-get update \
 && apt-get install -y --no-install-recommends g++ libgomp1 \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY constraints.txt ./
RUN pip install --no-cache-dir -c constraints.txt scikit-build-core cmake ninja
COPY pyproject.toml CMakeLists.txt README.md LICENSE ./
COPY src src
RUN pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheel .

FROM python:3.12.12-slim-bookworm
LABEL org.opencontainers.image.title="sansgpu" \
      org.opencontainers.image.description="Trains language models on machines without a GPU" \
      org.opencontainers.image.version="0.2.0" \
      org.opencontainers.image.licenses="Apache-2.0"
# g++ compiles the graphs of torch.compile. tini passes signals on and reaps what a killed run leaves.
# hadolint ignore=DL3008 # Debian removes a version when it publishes the next one.
RUN apt-get update \
 && apt-get install -y --no-install-recommends g++ libgomp1 libtcmalloc-minimal4 tini \
 && rm -rf /var/lib/apt/lists/* \
 && ln -s "/usr/lib/$(gcc -print-multiarch)/libtcmalloc_minimal.so.4" /usr/local/lib/libtcmalloc.so \
 && test -e /usr/local/lib/libtcmalloc.so
RUN groupadd --gid 1000 sansgpu \
 && useradd --uid 1000 --gid 1000 --no-create-home --home-dir /tmp sansgpu \
 && install -d -o 1000 -g 1000 /data

RUN pip install --no-cache-dir --no-deps --index-url https://download.pytorch.org/whl/cpu torch==2.13.0
COPY --from=wheel /source/constraints.txt /wheel/*.whl /opt/sansgpu/
RUN pip install --no-cache-dir -c /opt/sansgpu/constraints.txt "$(echo /opt/sansgpu/*.whl)[hf,report,tensorboard]" \
 && test "$(sansgpu --version)" = 0.2.0

ENV SANSGPU_CACHE=/data/cache \
    HF_HOME=/data/hub \
    HOME=/tmp \
    LD_PRELOAD=/usr/local/lib/libtcmalloc.so \
    PYTHONUNBUFFERED=1
USER 1000:1000
WORKDIR /data
VOLUME /data
# Unhealthy: no run in runs/ has recorded an event for half an hour. Kubernetes does not use this.
HEALTHCHECK --interval=5m --start-period=30m --retries=2 \
    CMD ["sh", "-c", "test -n \"$(find runs -maxdepth 2 -name metrics.jsonl -mmin -30)\""]
ENTRYPOINT ["tini", "-s", "--", "sansgpu"]
CMD ["--help"]
