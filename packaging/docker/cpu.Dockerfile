# asyncrl on CPUs, for queues, rewards, small runs: docker build -f packaging/docker/cpu.Dockerfile -t asyncrl:cpu .
FROM python:3.12-slim

# git: trackers note the commit of a run; a compiler: torch.compile
RUN apt-get update && apt-get install -y --no-install-recommends g++ git && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/asyncrl
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY packaging packaging
COPY configs configs
COPY asyncrl asyncrl

# packaging/install.py takes torch's build for the CPU where there is no GPU; the extras go on top of that torch.
ARG EXTRAS=server,math,data,prometheus
RUN python -m venv .venv \
 && .venv/bin/python packaging/install.py demo \
 && .venv/bin/python -m pip install --no-cache-dir -c constraints.txt -e ".[$EXTRAS]" \
 && rm -rf /root/.cache

RUN useradd --uid 1000 --create-home asyncrl && mkdir /work && chown asyncrl /work
ENV PATH=/opt/asyncrl/.venv/bin:$PATH
USER 1000
WORKDIR /work
