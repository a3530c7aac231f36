# asyncrl with vLLM on NVIDIA GPUs: docker build -f packaging/docker/gpu.Dockerfile -t asyncrl:gpu .
# torch and vLLM bring CUDA's libraries; the node brings the driver.
FROM python:3.12-slim

# a compiler: Triton and torch.compile use one while the run goes on
RUN apt-get update && apt-get install -y --no-install-recommends g++ git && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/asyncrl
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY packaging packaging
COPY configs configs
COPY asyncrl asyncrl

# No GPU is seen while an image is built, and packaging/install.py would take torch's build for the CPU. It keeps a torch
# of the pinned release that is there already: PyPI's, which carries CUDA.
ARG EXTRAS=server,math,data,prometheus,nvml
RUN python -m venv .venv \
 && .venv/bin/python -m pip install --no-cache-dir "$(grep '^torch==' constraints.txt)" \
 && .venv/bin/python packaging/install.py vllm \
 && .venv/bin/python -m pip install --no-cache-dir -c constraints.txt -e ".[$EXTRAS]" \
 && rm -rf /root/.cache

RUN useradd --uid 1000 --create-home asyncrl && mkdir /work && chown asyncrl /work
ENV PATH=/opt/asyncrl/.venv/bin:$PATH
USER 1000
WORKDIR /work
